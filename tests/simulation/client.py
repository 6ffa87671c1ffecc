"""One client process: the real session and exchange on a simulated connection, and callers that wait for answers.

What `Link`, `ControlChannel` and `Reader` do on threads is done here in steps, between which anything may happen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from mmcache.client.names import NamedKey, Names
from mmcache.control.calls import Acquisition, Call
from mmcache.control.exchange import Exchange
from mmcache.control.messages import PROTOCOL_VERSION, ClientMessage, ControllerMessage, Heartbeat, Hello
from mmcache.control.replica import Replica
from mmcache.control.session import Began, Connect, Deliver, Effect, Lost, Send, Session, SessionView
from mmcache.errors import ControllerUnavailable, DeadlineExceeded
from mmcache.key import EmbeddingKey

from .clock import Clock, Thread
from .network import Connection
from .store import Publication

if TYPE_CHECKING:
    from .world import World

_Result = TypeVar("_Result")
_LOCAL: Final = 1


class Until(NamedTuple):
    """A caller waits until this is so, no longer than so many seconds."""

    so: Callable[[], bool]
    seconds: float


Steps = Generator[float | Until, None, _Result]
"""What a caller does: it pauses for seconds, or waits."""


class Waiter(NamedTuple):
    """A caller that waits."""

    steps: Generator[float | Until, None, Any]
    until: Until


class Mark(NamedTuple):
    """As `mmcache.client.results.Mark`, which needs torch: a point in the sequence of invalidations."""

    lineage: str
    number: int
    at: float

    def covers(self, lineage: str, generation: int) -> bool:
        """Whether a key of this generation was the same at the mark already."""
        return lineage == self.lineage and generation <= self.number


class Client:
    """A process, from its start to its end."""

    def __init__(self, world: World, name: str, clock: Clock, *, serves_stale: bool) -> None:
        self.name = name
        self.channel, self.callers = Thread(), Thread()
        self.serves_stale = serves_stale
        self.connected_now = False
        hello = Hello(PROTOCOL_VERSION, name, "host", 1, serves_stale=serves_stale)
        self.session = Session(hello, random=world.random.random)
        self.exchange = Exchange(self._send)
        self.local: dict[str, Publication] = {}
        """Local entries by name: few."""
        self.clock = clock
        self._world = world
        self._connection: Connection | None = None
        self._names = Names(Replica(""))
        self._broken = False
        self._wakes_at = 0.0
        self._waiters: list[Waiter] = []
        self._perform(self.session.start(self.now()))
        self._rest()

    def now(self) -> float:
        """What its clock says."""
        return self.clock.at(self._world.events.now)

    # The channel's thread

    def connected(self, connection: Connection) -> None:
        """A connection that was asked for is there."""
        if connection is self._connection:
            self._turn(self.session.connected(self.now()))

    def receive(self, connection: Connection, message: ControllerMessage) -> None:
        """A message has come over a connection."""
        if connection is self._connection:
            if self._world.verbose:
                self._world.say(self.name, f"← {self._world.tell(message)}")
            self._turn(self.session.received(message, self.now()))

    def do(self, command: Callable[[], object]) -> None:
        """What callers hand over to the thread; nothing once it has ended."""
        if not self.channel.alive:
            return
        self._world.time.reading = self.now
        command()
        self._turn([])

    def _turn(self, effects: Sequence[Effect]) -> None:
        self._world.time.reading = self.now
        if effects:
            self._perform(effects)
        now = self.now()
        if due := self.session.tick(now):
            self._perform(due)
        self.exchange.tick(now)
        if self._broken:
            self._broken = False
            self._perform(self.session.disconnected("disconnected", "the connection broke", now))
        if self._waiters:
            self._look()
        self._rest()

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Connect():
                    self._disconnect()
                    self._broken = False
                    self._connection = self._world.network.connect(self)
                case Send(message):
                    self._send(message)
                case Began(view):
                    self.connected_now = True
                    self.exchange.begin(view)
                    self._world.say(self.name, f"has session {view.session % 1000}, lineage {view.lineage}")
                case Lost(reason):
                    self.connected_now = False
                    self._disconnect()
                    self.exchange.lost(reason)
                    self._world.count("session lost")
                    self._world.say(self.name, f"has lost its session: {reason}")
                case Deliver(message):
                    self.exchange.received(message, self.now())

    def _send(self, message: ClientMessage) -> None:
        if self._world.verbose and not isinstance(message, Heartbeat):
            self._world.say(self.name, f"→ {self._world.tell(message)}")
        if self._connection is not None and not self._world.network.send_up(self._connection, message):
            self._broken = True

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._world.network.close(connection)

    def _rest(self) -> None:
        dues = (self.session.next_deadline(), self.exchange.next_deadline())
        due = min((due for due in dues if due is not None), default=None)
        if due is None:
            return
        events = self._world.events
        wakes_at = max(events.now, self.clock.when(due))
        if not events.now < self._wakes_at <= wakes_at:
            self._wakes_at = events.after(wakes_at - events.now, self.channel, self._turn, ())

    # Its end

    @property
    def connection(self) -> Connection | None:
        """Its socket."""
        return self._connection

    def die(self) -> None:
        """It is killed."""
        self.channel.alive = self.callers.alive = False
        self._disconnect()

    def leave(self) -> None:
        """It ends as it should: nobody takes it for fresh any more when it says goodbye."""
        self.callers.alive = False
        self.exchange.close()
        self._perform(self.session.close())
        self.die()

    # Callers

    def begin(self, steps: Generator[float | Until, None, Any]) -> None:
        """A caller begins."""
        self._world.time.reading = self.now
        self._go_on(steps)

    def fresh(self) -> SessionView | None:
        """The session, if it is fresh now."""
        view = self.session.view
        if view is not None and (self.now() < view.fresh_until or self.serves_stale):
            return view
        return None

    @property
    def can_ask(self) -> bool:
        """Whether the channel takes calls."""
        return self.connected_now and self.fresh() is not None

    def names(self, view: SessionView, key: EmbeddingKey) -> NamedKey:
        """The name of a key now, as `Reader.wanted` makes it."""
        names = self._names
        if names.head != view.replica.head or names.replica is not view.replica:
            names = self._names = names.renewed(view.replica)
        return names[key]

    def remember(self, name: str, found: Publication) -> None:
        """Keep a local entry, and forget the oldest one where they are too many."""
        self.local[name] = found
        while len(self.local) > _LOCAL:
            del self.local[next(iter(self.local))]

    def generation(self, key: EmbeddingKey) -> int:
        """What it takes for the generation of a key; -1 without a session."""
        view = self.session.view
        return -1 if view is None else view.replica.generation(key.scope, key.mm_digest)

    def mark(self) -> Mark | None:
        """A mark; None where it would cover nothing."""
        view = self.fresh()
        return None if view is None else Mark(view.lineage, view.replica.head, self._world.events.now)

    def acquire(self, keys: int, *, wait_s: float) -> Acquisition:
        """An acquisition that is not sent yet."""
        self._world.time.reading = self.now
        return Acquisition(
            keys,
            wait_s=wait_s,
            renew_for_s=30.0,
            check=lambda: None,
            leave=lambda one: self.do(lambda: self.exchange.leave(one)),
        )

    def outcome(self, call: Call[_Result]) -> list[_Result] | None:
        """The results of a call; None if they have not all come, or will not."""
        self._world.time.reading = self.now
        try:
            return call.wait(0.0)
        except (DeadlineExceeded, ControllerUnavailable):
            return None

    def _look(self) -> None:
        """Let those go on whose wait is over."""
        for waiter in [waiter for waiter in self._waiters if waiter.until.so()]:
            self._resume(waiter)

    def _resume(self, waiter: Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._world.events.after(self._world.pause(), self.callers, self.begin, waiter.steps)

    def _go_on(self, steps: Generator[float | Until, None, Any]) -> None:
        for wish in steps:
            if isinstance(wish, Until):
                if wish.so():
                    continue
                waiter = Waiter(steps, wish)
                self._waiters.append(waiter)
                self._world.events.after(wish.seconds, self.callers, self._resume, waiter)
            else:
                self._world.events.after(wish, self.callers, self.begin, steps)
            return


def over(call: Call[Any]) -> Callable[[], bool]:
    """Whether a call has its results, or will not have them."""
    return lambda: not call._missing or call._failure is not None


def resolved(acquisition: Acquisition) -> Callable[[], bool]:
    """Whether some of an acquisition's waits have ended, or none will."""
    return lambda: bool(acquisition._resolved) or acquisition.lost or not acquisition._waiting
