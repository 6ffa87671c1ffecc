"""Exchanges of several clients against the controller's own core, under any schedule of messages in flight.

Whatever happens: a claim that the controller counts has an owner here or a message on the way that ends it, and when
everyone has gone, nothing is left behind on either side. What is computed while a controller restarts is claimed by
whoever computes it before anybody else can claim it.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mmcache.control.batches import CommitEntry, commit_batches, key_batches
from mmcache.control.calls import Acquisition, Call
from mmcache.control.exchange import Exchange
from mmcache.control.messages import (
    PROTOCOL_VERSION,
    AbortReason,
    ClientMessage,
    CommitStatus,
    ControllerMessage,
    Granted,
    Hello,
    Hit,
    Welcome,
)
from mmcache.control.session import Deliver, Session
from mmcache.controller.core import ControllerCore
from mmcache.controller.durable import Past
from mmcache.controller.limits import ControllerLimits
from mmcache.errors import ControllerUnavailable, DeadlineExceeded
from mmcache.key import EmbeddingKey

KEYS = [EmbeddingKey(f"model{number % 2}", "v", f"hash{number}") for number in range(4)]
HOUR_MS = 3_600_000


class Asker:
    """A caller within a client: what it asked for, and the claims that it knows of."""

    def __init__(self, client: Client, keys: list[EmbeddingKey]) -> None:
        self.client = client
        self.keys = keys
        self.acquisition = Acquisition(
            len(keys), wait_s=3600.0, renew_for_s=3600.0, check=lambda: None, leave=client.exchange.leave
        )
        self.claims: dict[int, EmbeddingKey] = {}
        client.exchange.acquire(self.acquisition, key_batches(keys))

    def look(self) -> None:
        """Take what has come. Raises DeadlineExceeded before the answers, ControllerUnavailable if none will come."""
        if not self.acquisition.answers:
            self.acquisition.answers = self.acquisition.wait(0.0)
            self._note(list(enumerate(self.acquisition.answers)))
        self._note(self.acquisition.resolutions(0.0))

    def _note(self, answers: list) -> None:
        self.claims.update((answer.token, self.keys[index]) for index, answer in answers if isinstance(answer, Granted))


class Client:
    """An exchange and its session; messages in both directions wait until the schedule lets them through."""

    def __init__(self, core: ControllerCore, now: Callable[[], float]) -> None:
        self.core = core
        self.now = now
        self.numbers = itertools.count()
        self.peer = b""
        self.up: deque[ClientMessage] = deque()
        self.down: deque[ControllerMessage] = deque()
        self.exchange = Exchange(self.up.append)
        self.askers: list[Asker] = []
        self.connect()

    def connect(self) -> None:
        self.peer = f"{id(self)}.{next(self.numbers)}".encode()
        self.session = Session(Hello(PROTOCOL_VERSION, "c", "h", 1), random=lambda: 0.0)
        self.session.start(self.now())
        self.session.connected(self.now())
        [(_, welcome)] = self.core.handle(self.peer, Hello(PROTOCOL_VERSION, "c", "h", 1), self.now())
        assert isinstance(welcome, Welcome)
        self.session.received(welcome, self.now())
        assert self.session.view is not None
        self.exchange.begin(self.session.view)

    def lose_session(self) -> None:
        self.up.clear()
        self.down.clear()
        self.exchange.lost("test")


class AnySchedule(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = 1000.0
        self.terms = itertools.count(1)
        self.sessions = itertools.count(1)
        self.core = self.a_term()
        self.lingering: list[bytes] = []
        """Connections that broke, which the controller does not know."""
        self.clients = [Client(self.core, lambda: self.now) for _ in range(3)]

    def a_term(self) -> ControllerCore:
        return ControllerCore(
            ControllerLimits(ttl_ms=HOUR_MS, claim_ms=HOUR_MS),
            term=next(self.terms),
            past=Past("a"),
            random_session=self.sessions.__next__,
        )

    def route(self, effects: list[tuple[bytes, ControllerMessage]]) -> None:
        by_peer = {client.peer: client for client in self.clients}
        for peer, message in effects:
            if peer in by_peer:
                by_peer[peer].down.append(message)

    @rule(who=st.integers(0, 2), which=st.sets(st.integers(0, 3), min_size=1))
    def ask(self, who: int, which: set[int]) -> None:
        client = self.clients[who]
        client.askers.append(Asker(client, [KEYS[number] for number in sorted(which)]))

    @rule(who=st.integers(0, 2), which=st.sets(st.integers(0, 3), min_size=1))
    def ask_and_hear(self, who: int, which: set[int]) -> None:
        """So that claims are held often enough for what befalls them."""
        self.ask(who, which)
        client = self.clients[who]
        while client.up or client.down:
            self.controller_reads(who, 4)
            self.client_reads(who, 4)

    @rule(who=st.integers(0, 2), count=st.integers(1, 4))
    def controller_reads(self, who: int, count: int) -> None:
        client = self.clients[who]
        for _ in range(min(count, len(client.up))):
            self.route(self.core.handle(client.peer, client.up.popleft(), self.now))

    @rule(who=st.integers(0, 2), count=st.integers(1, 4))
    def client_reads(self, who: int, count: int) -> None:
        client = self.clients[who]
        for _ in range(min(count, len(client.down))):
            for effect in client.session.received(client.down.popleft(), self.now):
                assert isinstance(effect, Deliver)
                client.exchange.received(effect.message, time.monotonic())

    @rule(who=st.integers(0, 2), data=st.data())
    def someone_looks(self, who: int, data: st.DataObject) -> None:
        if self.clients[who].askers:
            asker = data.draw(st.sampled_from(self.clients[who].askers))
            try:
                asker.look()
            except DeadlineExceeded:
                pass
            except ControllerUnavailable:
                self.clients[who].askers.remove(asker)

    @rule(who=st.integers(0, 2), data=st.data())
    def someone_leaves(self, who: int, data: st.DataObject) -> None:
        """At its deadline before the answer, or with waits open; claims that it knows of it gives up."""
        if self.clients[who].askers:
            asker = data.draw(st.sampled_from(self.clients[who].askers))
            self.give_up(asker)

    def give_up(self, asker: Asker) -> None:
        asker.client.askers.remove(asker)
        asker.acquisition.leave()
        asker.client.exchange.abort(list(asker.claims), AbortReason.FAILED)

    @rule(who=st.integers(0, 2), data=st.data())
    def someone_commits(self, who: int, data: st.DataObject) -> None:
        askers = [asker for asker in self.clients[who].askers if asker.claims]
        if askers:
            asker = data.draw(st.sampled_from(askers))
            token, key = asker.claims.popitem()
            call: Call[CommitStatus] = Call(1)
            entry = CommitEntry(key, 0, token, 100, 1.0, b"info")
            self.clients[who].exchange.commit(call, commit_batches([entry]), None)

    @rule(key=st.sampled_from(KEYS))
    def an_entry_goes_missing(self, key: EmbeddingKey) -> None:
        """So that there is something to compute again."""
        hit = self.core._entries.directory.find([key.scope.digest + key.mm_digest], [0])[0]
        if isinstance(hit, Hit):
            self.core._entries.directory.drop(key.scope.digest + key.mm_digest, hit.revision)

    @rule(who=st.integers(0, 2))
    def renewals_are_due(self, who: int) -> None:
        self.clients[who].exchange.tick(time.monotonic() + HOUR_MS / 1000 / 2)

    @rule(who=st.integers(0, 2))
    def a_connection_breaks(self, who: int) -> None:
        client = self.clients[who]
        old = client.peer
        client.lose_session()
        self.route(self.core.unreachable(old, self.now))
        client.connect()

    @rule(who=st.integers(0, 2))
    def a_connection_breaks_and_the_controller_does_not_know(self, who: int) -> None:
        client = self.clients[who]
        self.lingering.append(client.peer)
        client.lose_session()
        client.connect()

    @rule(order=st.permutations(range(3)))
    def the_controller_restarts(self, order: list[int]) -> None:
        """What was computed when it ended is claimed by who computes it, as soon as each client was heard of."""
        computing: dict[bytes, list[Client]] = {}
        for client in self.clients:
            for claim in client.exchange._claims._claims.values():
                computing.setdefault(claim.subject.scope.digest + claim.subject.digest, []).append(client)
            client.lose_session()
        self.core = self.a_term()
        self.lingering.clear()
        for who in order:
            self.clients[who].core = self.core
            self.clients[who].connect()
            self.controller_reads(who, 4)
        for name, clients in computing.items():
            sessions = [self.core._sessions.at(client.peer) for client in clients]
            token = self.core._entries.claims.token_of(name)
            assert token is not None
            assert any(
                session and self.core._entries.claims._by_token[token].party.session == session.number
                for session in sessions
            )

    @invariant()
    def every_claim_has_an_owner_or_an_end_on_the_way(self) -> None:
        """At most one message away: granted and unread here, held here, or ended by a message unread there."""
        if not hasattr(self, "core"):
            return
        for client in self.clients:
            here = set(client.exchange._claims._by_token)
            for message in (*client.up, *client.down):
                here |= set(getattr(message, "tokens", ()))
                for group in getattr(message, "groups", ()):
                    here |= {entry.token for entry in getattr(group, "entries", ())}
                for result in getattr(message, "results", ()):
                    granted = result[1] if isinstance(result, tuple) else result
                    if isinstance(granted, Granted):
                        here.add(granted.token)
            session = self.core._sessions.at(client.peer)
            assert session is not None
            party = self.core._entries.claims._parties.get(session.number)
            assert party is None or party.tokens <= here

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for client in self.clients:
            for asker in list(client.askers):
                self.give_up(asker)
        for peer in self.lingering:
            self.route(self.core.unreachable(peer, self.now))
        while any(client.up or client.down for client in self.clients):
            for who in range(3):
                self.controller_reads(who, 4)
                self.client_reads(who, 4)
        for client in self.clients:
            assert len(client.exchange._claims) == 0
            assert not client.exchange._requests
            assert not client.exchange._waits
        stats = self.core.stats()
        assert (stats["claims"], stats["waiters"]) == (0, 0)


AnySchedule.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestAnySchedule = AnySchedule.TestCase


def test_a_name_has_one_owner_among_the_callers_of_one_client() -> None:
    """What was granted to a caller that left is granted anew to the next, and never ended under its hands."""
    core = ControllerCore(ControllerLimits(), term=1, past=Past("a"), random_session=itertools.count(1).__next__)
    client = Client(core, lambda: 1000.0)

    def settle() -> None:
        while client.up or client.down:
            while client.up:
                client.down.extend(message for _, message in core.handle(client.peer, client.up.popleft(), 1000.0))
            while client.down:
                client.exchange.received(client.down.popleft(), time.monotonic())  # type: ignore[arg-type]

    first = Asker(client, KEYS[:1])
    first.acquisition.leave()  # at its deadline, before the answer
    second = Asker(client, KEYS[:1])
    settle()
    with pytest.raises(DeadlineExceeded):
        first.acquisition.wait(0.0)
    second.look()
    assert len(second.claims) == 1
    assert core.stats()["claims"] == 1
