"""A core, a clock, and clients that speak to it by message, for the tests of its rules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mmcache.control.messages import (
    PROTOCOL_VERSION,
    Abandon,
    Abandoned,
    AbandonReason,
    Abort,
    AbortReason,
    Acquire,
    Acquired,
    Answer,
    Applied,
    ClientMessage,
    Commit,
    CommitGroup,
    Commitment,
    CommitStatus,
    Committed,
    ControllerMessage,
    Follow,
    Found,
    Goodbye,
    Granted,
    Heartbeat,
    Hello,
    Hit,
    Invalidate,
    KeyGroup,
    Leave,
    Lookup,
    Missing,
    Progress,
    Push,
    Renew,
    Renewed,
    Report,
    Resolved,
    Welcome,
    decode_from_client,
    decode_from_controller,
    encode,
)
from mmcache.controller.core import ControllerCore, Effects
from mmcache.controller.durable import Past, ToWrite
from mmcache.controller.limits import ControllerLimits
from mmcache.key import Scope, mm_digest
from mmcache.selector import Selector

TERM = 7
LINEAGE = "0123456789abcdef"
NEW = Past(LINEAGE)
SCOPE = Scope("default", "siglip", "v1", None, "image")


def digests(*mm_hashes: str) -> list[bytes]:
    return [mm_digest(mm_hash) for mm_hash in mm_hashes]


def group(*mm_hashes: str) -> list[KeyGroup]:
    return [KeyGroup(SCOPE, digests(*mm_hashes))]


class World:
    """Hands effects to the clients that they are for, and fails where there is none."""

    def __init__(self, past: Past = NEW, **limits: int) -> None:
        self.now = 1000.0
        self.durable: list[ToWrite] = []
        self.disk_full = False
        self.core = ControllerCore(
            ControllerLimits(**limits), term=TERM, past=past, random_session=itertools.count(500).__next__
        )
        self.clients: dict[bytes, Client] = {}

    def client(self, peer: str) -> Client:
        return Client(self, peer.encode())

    def advance(self, seconds: float) -> None:
        """Let time pass and nothing else happen, tick by tick as a server would."""
        until = self.now + seconds
        while (due := self.core.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.deliver(self.core.tick(self.now) + self.write())
        self.now = until

    def write(self) -> Effects:
        """Make durable what must be, as a server would before it sends anything; fail where `disk_full` says."""
        effects: Effects = []
        while (todo := self.core.take_writes()) is not None:
            if self.disk_full:
                return effects + self.core.not_written("the disk is full")
            self.durable.append(todo)
            effects += self.core.written(self.now)
        return effects

    def deliver(self, effects: Effects) -> None:
        for peer, message in effects:
            self.clients[peer].inbox.append(decode_from_controller(encode(message)))

    def stats(self, *names: str) -> tuple[int, ...]:
        stats = self.core.stats()
        return tuple(stats.get(name, 0) for name in names)


class Client:
    """One connection with a session, and what has come over it."""

    def __init__(self, world: World, peer: bytes) -> None:
        self.world = world
        self.peer = peer
        self.inbox: list[ControllerMessage] = []
        self.requests = itertools.count(1)
        self.session = 0
        world.clients[peer] = self
        self.hello()

    def hello(
        self, *, lineage: str = "", applied: int = 0, serves_stale: bool = False, term: int = TERM
    ) -> ControllerMessage:
        hello = Hello(PROTOCOL_VERSION, self.peer.decode(), "host", 1, lineage, applied, serves_stale, term)
        welcome = self.ask(hello)
        if isinstance(welcome, Welcome):
            self.session = welcome.session
        return welcome

    def invalidate(self, selector: Selector, idempotency: str = "") -> ControllerMessage:
        return self.ask(Invalidate(TERM, self.session, next(self.requests), selector, "why", idempotency))

    def apply(self, number: int) -> None:
        self.tell(Applied(TERM, self.session, number))

    def follow(self, number: int, wait_ms: int = 0) -> int:
        """Returns the number of the request."""
        request = next(self.requests)
        self.tell(Follow(TERM, self.session, request, number, wait_ms))
        return request

    def progress(self) -> list[tuple[int, bool, int]]:
        """Requests that were told of an invalidation: whether it is complete, and how many sessions are awaited."""
        told = [message for message in self.inbox if isinstance(message, Progress)]
        self.inbox = [message for message in self.inbox if not isinstance(message, Progress)]
        return [(message.request, message.complete, message.waiting) for message in told]

    def pushes(self) -> list[Push]:
        pushes = [message for message in self.inbox if isinstance(message, Push)]
        self.inbox = [message for message in self.inbox if not isinstance(message, Push)]
        return pushes

    def tell(self, message: ClientMessage) -> None:
        message = decode_from_client(encode(message))
        self.world.deliver(self.world.core.handle(self.peer, message, self.world.now) + self.world.write())

    def ask(self, message: ClientMessage) -> ControllerMessage:
        """Tell, and take the answer out of the inbox."""
        seen = len(self.inbox)
        self.tell(message)
        answers = [i for i in range(seen, len(self.inbox)) if not isinstance(self.inbox[i], Resolved | Push)]
        assert len(answers) == 1
        return self.inbox.pop(answers[0])

    def acquire_message(self, *mm_hashes: str, wait_ms: int = 30_000, request: int = 0) -> Acquire:
        return Acquire(TERM, self.session, request or next(self.requests), wait_ms, group(*mm_hashes))

    def acquire(self, *mm_hashes: str, wait_ms: int = 30_000, request: int = 0) -> list[Answer]:
        answer = self.ask(self.acquire_message(*mm_hashes, wait_ms=wait_ms, request=request))
        assert isinstance(answer, Acquired)
        assert len(answer.results) == len(mm_hashes)
        return answer.results

    def claim(self, mm_hash: str) -> int:
        """The token of a claim that must be granted."""
        (answer,) = self.acquire(mm_hash)
        assert isinstance(answer, Granted)
        return answer.token

    def commit(self, *mm_hashes: str, tokens: Sequence[int] = (), generation: int = 0, info: bytes = b"i") -> list[int]:
        entries = [
            Commitment(mm_hash, generation, token, 5000, 1.5, info)
            for mm_hash, token in itertools.zip_longest(mm_hashes, tokens, fillvalue=0)
        ]
        answer = self.ask(Commit(TERM, self.session, next(self.requests), [CommitGroup(SCOPE, entries)]))
        assert isinstance(answer, Committed)
        return answer.results

    def put(self, *mm_hashes: str, info: bytes = b"i") -> None:
        assert set(self.commit(*mm_hashes, info=info)) == {CommitStatus.STORED}

    def renew(self, *tokens: int) -> list[int]:
        answer = self.ask(Renew(TERM, self.session, next(self.requests), list(tokens)))
        assert isinstance(answer, Renewed)
        return answer.lost

    def abort(self, reason: AbortReason, *tokens: int) -> None:
        self.tell(Abort(TERM, self.session, reason, list(tokens)))

    def abandon(self, mm_hash: str, generation: int = 0, *, token: int = 0, mm_hashes: Sequence[str] = ()) -> None:
        """With a token: a dead writer holds the name of this claim."""
        reason = AbandonReason.HELD if token else AbandonReason.CORRUPT
        entries = [Abandoned(SCOPE, one, generation, token, reason) for one in (mm_hash, *mm_hashes)]
        self.tell(Abandon(TERM, self.session, entries))

    def leave(self, request: int) -> None:
        self.tell(Leave(TERM, self.session, request))

    def report(self, mm_hash: str, revision: int) -> None:
        self.tell(Report(TERM, self.session, [Missing(SCOPE, mm_digest(mm_hash), revision)]))

    def lookup(self, *mm_hashes: str) -> list[Hit | None]:
        answer = self.ask(Lookup(TERM, self.session, next(self.requests), group(*mm_hashes)))
        assert isinstance(answer, Found)
        return answer.results

    def heartbeat(self, number: int = 1, *, applied: int = 0) -> ControllerMessage:
        return self.ask(Heartbeat(TERM, self.session, number, applied))

    def goodbye(self) -> None:
        self.tell(Goodbye(TERM, self.session))

    def resolved(self) -> list[tuple[int, int, object]]:
        """Take all ends of waits out of the inbox, as request, position and result; nothing else may be there."""
        ends = []
        for message in self.inbox:
            assert isinstance(message, Resolved)
            assert (message.term, message.session) == (TERM, self.session)
            ends += [(message.request, position, result) for position, result in message.results]
        self.inbox.clear()
        return ends
