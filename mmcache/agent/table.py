"""The items that an engine has asked for and that have had no last word: where each stands, and who may end it.

One lock orders all that the engine is told of an item, so that nothing follows its last word. No I/O but `post`.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from mmcache.agent.messages import AgentMessage, Granted, Item, Missing, Published, Ready, Waiting
from mmcache.client.names import NamedKey
from mmcache.control.channel import Acquisition

MAX_ITEMS: Final = 4096

LastWord = Ready | Missing | Published


class State(enum.Enum):
    """Where an item stands. Its block is written to only while it is filled, by the one thread that fills it."""

    ASKED = "asked"
    """It is read, acquired or awaited."""
    FILLING = "filling"
    GRANTED = "granted"
    """Its block is the engine's."""
    PUBLISHING = "publishing"


class Claim(NamedTuple):
    """The right to compute an item: the name at the generation that it is for, and its token."""

    target: NamedKey
    token: int


class Wait:
    """Items of one acquisition that wait. When the last of them is dropped, the acquisition is to be left."""

    __slots__ = ("acquisition", "left")

    def __init__(self, acquisition: Acquisition) -> None:
        self.acquisition = acquisition
        self.left = 0


class Wanted:
    """One item under way.

    Attributes:
        until: when its wait for another engine's result is over, in `time.monotonic()` seconds.
        named: its name, and `epoch` the staging memory's from before the name was known; once it is served.
        claim: only while it is granted or published.
    """

    __slots__ = ("claim", "epoch", "item", "named", "state", "told_to_wait", "until", "wait")

    def __init__(self, item: Item, until: float) -> None:
        self.item = item
        self.until = until
        self.state = State.ASKED
        self.epoch = 0
        self.named: NamedKey | None = None
        self.claim: Claim | None = None
        self.wait: Wait | None = None
        self.told_to_wait = False

    @property
    def name(self) -> NamedKey:
        """Its name, at the generation of its claim if it has one. Only once it is served."""
        if self.claim is not None:
            return self.claim.target
        if self.named is None:
            raise RuntimeError(f"item {self.item.number} is not served yet")
        return self.named


class Dropped(NamedTuple):
    """What is to be given up for an item that was dropped."""

    claim: Claim | None
    acquisition: Acquisition | None


class Table:
    """All items under way, by number; bounded.

    Args:
        post: tells the engine; must not raise.
    """

    def __init__(self, post: Callable[[AgentMessage], None]) -> None:
        self._post = post
        self._wanted: dict[int, Wanted] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._wanted)

    def add(self, item: Item, until: float) -> Wanted | None:
        """Take an item on; None for a number that is under way already, and where there is no room for it."""
        with self._lock:
            if item.number in self._wanted:
                return None
            if len(self._wanted) >= MAX_ITEMS:
                self._post(Missing(item.number, "overloaded"))
                return None
            wanted = self._wanted[item.number] = Wanted(item, until)
            return wanted

    def lives(self, wanted: Wanted) -> bool:
        """Whether it has had no last word."""
        return self._wanted.get(wanted.item.number) is wanted

    def end(self, wanted: Wanted, word: LastWord) -> bool:
        """Its last word, unless it has had one. Only for the thread that serves it."""
        with self._lock:
            return self._end(wanted, word)

    def fail(self, wanted: Wanted) -> None:
        """End an item that nobody reads into its block, and whose claim the engine has not been told of."""
        with self._lock:
            if wanted.state is State.ASKED:
                self._end(wanted, Missing(wanted.item.number, "failed"))

    def begin_filling(self, wanted: Wanted) -> bool:
        """Whether its block may be written to, until its `end`."""
        with self._lock:
            if not self.lives(wanted):
                return False
            wanted.state = State.FILLING
            return True

    def wait(self, wanted: Wanted, wait: Wait) -> bool:
        """It waits; False if it has ended."""
        with self._lock:
            if not self.lives(wanted):
                return False
            wanted.wait = wait
            wait.left += 1
            if not wanted.told_to_wait:
                wanted.told_to_wait = True
                self._post(Waiting(wanted.item.number))
            return True

    def wait_no_more(self, wanted: Wanted) -> bool:
        """Its wait is over; False if it has ended."""
        with self._lock:
            if not self.lives(wanted):
                return False
            self._leave(wanted)
            return True

    def grant(self, wanted: Wanted, claim: Claim) -> bool:
        """Its block is the engine's; False if it has ended."""
        with self._lock:
            if not self.lives(wanted):
                return False
            wanted.state = State.GRANTED
            wanted.claim = claim
            self._post(Granted(wanted.item.number))
            return True

    def begin_publishing(self, number: int) -> Wanted | None:
        """An item that was granted is published, until its `end`; None for any other."""
        with self._lock:
            wanted = self._wanted.get(number)
            if wanted is None or wanted.state is not State.GRANTED:
                return None
            wanted.state = State.PUBLISHING
            return wanted

    def drop(self, number: int) -> Dropped:
        """End an item, unless it is unknown or its last word is under way."""
        with self._lock:
            wanted = self._wanted.get(number)
            if wanted is None or wanted.state in (State.FILLING, State.PUBLISHING):
                return Dropped(None, None)
            del self._wanted[number]
            wait = wanted.wait
            self._leave(wanted)
            self._post(Missing(number, "dropped"))
            return Dropped(wanted.claim, wait.acquisition if wait is not None and not wait.left else None)

    def _end(self, wanted: Wanted, word: LastWord) -> bool:
        if not self.lives(wanted):
            return False
        del self._wanted[wanted.item.number]
        self._leave(wanted)
        self._post(word)
        return True

    @staticmethod
    def _leave(wanted: Wanted) -> None:
        if wanted.wait is not None:
            wanted.wait.left -= 1
            wanted.wait = None
