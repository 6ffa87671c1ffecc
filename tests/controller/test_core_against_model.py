"""Random schedules of several clients against the core; a model built from the messages alone says what must hold.

S5: at most one live claim a name. L1: a claim that is not renewed passes on at its deadline. L2: every wait ends, and
nobody waits where nobody computes. Nothing is sent to who has no session, and nothing is left when all are gone.
"""

from __future__ import annotations

import itertools

from controller_driver import LINEAGE, SCOPE, TERM, group
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mmcache.control.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortReason,
    Acquire,
    Acquired,
    ClientMessage,
    Commit,
    CommitGroup,
    Commitment,
    CommitStatus,
    Committed,
    Found,
    Goodbye,
    Granted,
    Heartbeat,
    Hello,
    HelloAgain,
    Hit,
    Leave,
    Lookup,
    Missing,
    Renew,
    Renewed,
    Report,
    Resolved,
    Unclaimed,
    Waiting,
    Welcome,
    decode_from_controller,
    encode,
)
from mmcache.controller.core import ControllerCore, Effects
from mmcache.controller.durable import Past
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.sessions import DRIFT_BOUND
from mmcache.key import mm_digest

TTL, CLAIM, HOLD = 5.0, 4.0, 7.0
peers = st.sampled_from([b"p0", b"p1", b"p2"] * 3 + [b"p3"])
names = st.sampled_from(["a", "a", "a", "b", "c"])
pick = st.integers(0, 1 << 16)


class CoreAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        limits = ControllerLimits(
            ttl_ms=int(TTL * 1000), claim_ms=int(CLAIM * 1000), hold_ms=int(HOLD * 1000), max_entries=2, max_sessions=3
        )
        self.core = ControllerCore(limits, term=TERM, past=Past(LINEAGE), random_session=itertools.count(500).__next__)
        self.request = itertools.count(1)
        self.sessions: dict[bytes, tuple[int, float]] = {}  # peer: session, end
        self.ended: list[float] = []  # until when the clients of those that are over may not know it
        self.claims: dict[str, tuple[int, int, float]] = {}  # name: token, session, end
        self.waits: dict[tuple[int, int, int], tuple[str, float]] = {}  # session, request, position: name, end
        self.holds: dict[str, float] = {}
        self.entries: dict[str, int] = {}  # name: revision
        self.acquires: dict[tuple[int, int], tuple[list[str], int]] = {}  # all that were ever sent, for retries

    # What the model knows of the passing of time and of ends

    def _end_session(self, peer: bytes, *, knows: bool = False) -> None:
        session, end = self.sessions.pop(peer)
        if not knows:
            self.ended.append(end)
        self.claims = {name: claim for name, claim in self.claims.items() if claim[1] != session}
        self.waits = {wait: what for wait, what in self.waits.items() if wait[0] != session}

    def _pass_time(self) -> None:
        for peer in [peer for peer, (_, end) in self.sessions.items() if end <= self.now]:
            self._end_session(peer)
        self.ended = [end for end in self.ended if end > self.now]
        self.claims = {name: claim for name, claim in self.claims.items() if claim[2] > self.now}
        self.waits = {wait: what for wait, what in self.waits.items() if what[1] > self.now}
        self.holds = {name: end for name, end in self.holds.items() if end > self.now}

    # What effects tell the model

    def _granted(self, name: str, session: int, granted: Granted) -> None:
        assert name not in self.holds
        assert name not in self.entries
        known = self.claims.get(name)
        if known is None or known[0] != granted.token:
            assert known is None, "two live claims of one name"
            assert granted.claim_ms == CLAIM * 1000
            self.claims[name] = (granted.token, session, self.now + CLAIM)
        assert self.claims[name][1] == session

    def _settle(self, session: int, request: int, position: int, name: str, result: object) -> None:
        match result:
            case Granted():
                self._granted(name, session, result)
            case Hit():
                self.entries.setdefault(name, result.revision)
                assert self.entries[name] == result.revision
            case Waiting():
                return
            case Unclaimed("held"):
                assert name in self.holds
            case Unclaimed("claimed"):
                assert name in self.claims
            case Unclaimed("no_room"):
                assert name not in self.claims
            case _:
                raise AssertionError(result)
        self.waits.pop((session, request, position), None)

    def _read(self, effects: Effects, sender: bytes | None) -> object:
        answer = None
        for peer, sent in effects:
            message = decode_from_controller(encode(sent))
            if isinstance(message, Resolved):
                assert self.sessions[peer][0] == message.session
                for position, result in message.results:
                    name, _ = self.waits[message.session, message.request, position]
                    self._settle(message.session, message.request, position, name, result)
            else:
                assert peer == sender
                assert answer is None
                answer = message
                if isinstance(message, Acquired):
                    asked, _ = self.acquires[message.session, message.request]
                    for position, (name, result) in enumerate(zip(asked, message.results, strict=True)):
                        self._settle(message.session, message.request, position, name, result)
        return answer

    def _send(self, peer: bytes, message: ClientMessage) -> object:
        return self._read(self.core.handle(peer, message, self.now), peer)

    def _session(self, peer: bytes) -> int | None:
        """The live session of a peer; a peer without one sends something and is told to say hello again."""
        self._pass_time()
        if peer in self.sessions:
            return self.sessions[peer][0]
        assert isinstance(self._send(peer, Heartbeat(TERM, 1, 1, 0)), HelloAgain)
        return None

    def _some_token(self, choice: int) -> int:
        tokens = [token for token, _, _ in self.claims.values()] or [0]
        return tokens[choice % len(tokens)]

    # What may happen

    @initialize()
    def all_say_hello(self) -> None:
        for peer in (b"p0", b"p1", b"p2"):
            self.hello(peer)

    @rule(seconds=st.sampled_from([0.0, 0.5, 0.5, 1.0, 1.0, 2.0, 4.0, 5.25, 9.0]), tick=st.booleans())
    def time_passes(self, seconds: float, tick: bool) -> None:
        self.now += seconds
        self._pass_time()
        if tick:
            self._read(self.core.tick(self.now), None)
            due = self.core.next_deadline()
            ends = [end for _, end in self.sessions.values()] + [end for _, _, end in self.claims.values()]
            assert due is None or due > self.now
            assert not ends or (due is not None and due <= min(ends))
        else:
            self._read(self.core.malformed(b"stranger", "garbage", self.now), b"stranger")

    @rule(peer=peers)
    def hello(self, peer: bytes) -> None:
        self._pass_time()
        if peer in self.sessions:
            self._end_session(peer)
        answer = self._send(peer, Hello(PROTOCOL_VERSION, "n", "h", 1))
        assert isinstance(answer, Welcome) == (len(self.sessions) < 3 and len(self.sessions) + len(self.ended) < 6)
        if isinstance(answer, Welcome):
            self.sessions[peer] = (answer.session, self.now + TTL * (1 + DRIFT_BOUND))

    @rule(peer=peers)
    def heartbeat(self, peer: bytes) -> None:
        if (session := self._session(peer)) is not None:
            self._send(peer, Heartbeat(TERM, session, 1, 0))
            self.sessions[peer] = (session, self.now + TTL * (1 + DRIFT_BOUND))

    @rule(peer=peers, asked=st.lists(names, min_size=1, max_size=4), wait_ms=st.sampled_from([0, 1000, 6000, 30_000]))
    def acquire(self, peer: bytes, asked: list[str], wait_ms: int) -> None:
        if (session := self._session(peer)) is not None:
            request = next(self.request)
            self.acquires[session, request] = (asked, wait_ms)
            self._acquire(peer, session, request)

    @rule(peer=peers, choice=pick)
    def acquire_is_repeated(self, peer: bytes, choice: int) -> None:
        session = self._session(peer)
        sent = [request for of, request in self.acquires if of == session]
        if session is not None and sent:
            self._acquire(peer, session, sent[choice % len(sent)])

    def _acquire(self, peer: bytes, session: int, request: int) -> None:
        asked, wait_ms = self.acquires[session, request]
        waiting = [end for wait, (_, end) in self.waits.items() if wait[:2] == (session, request)]
        end = min(waiting, default=self.now + wait_ms / 1000)  # a retry does not wait longer
        answer = self._send(peer, Acquire(TERM, session, request, wait_ms, group(*asked)))
        assert isinstance(answer, Acquired)
        for position, result in enumerate(answer.results):
            if isinstance(result, Waiting):
                self.waits.setdefault((session, request, position), (asked[position], end))

    @rule(peer=peers, choice=pick)
    def leave(self, peer: bytes, choice: int) -> None:
        session = self._session(peer)
        sent = [request for of, request in self.acquires if of == session]
        if session is not None and sent:
            request = sent[choice % len(sent)]
            self._send(peer, Leave(TERM, session, request))
            self.waits = {wait: what for wait, what in self.waits.items() if wait[:2] != (session, request)}

    @rule(peer=peers, choice=pick)
    def renew(self, peer: bytes, choice: int) -> None:
        if (session := self._session(peer)) is not None:
            token = self._some_token(choice)
            mine = [name for name, claim in self.claims.items() if claim[:2] == (token, session)]
            answer = self._send(peer, Renew(TERM, session, 1, [token]))
            assert isinstance(answer, Renewed)
            assert answer.lost == ([] if mine else [token])
            self.claims.update(dict.fromkeys(mine, (token, session, self.now + CLAIM)))

    @rule(peer=peers, choice=pick, reason=st.sampled_from(list(AbortReason)))
    def abort(self, peer: bytes, choice: int, reason: AbortReason) -> None:
        if (session := self._session(peer)) is not None:
            token = self._some_token(choice)
            for name in [name for name, claim in self.claims.items() if claim[:2] == (token, session)]:
                del self.claims[name]
                if reason is AbortReason.HELD:
                    self.holds[name] = self.now + HOLD
            self._send(peer, Abort(TERM, session, reason, [token]))

    @rule(peer=peers, name=names, choice=pick, generation=st.sampled_from([0, 0, 0, 1]))
    def commit(self, peer: bytes, name: str, choice: int, generation: int) -> None:
        if (session := self._session(peer)) is None:
            return
        token = self._some_token(choice)
        full = name not in self.entries and len(self.entries) >= 2
        accepted = generation == 0 and not full
        if accepted:
            self.holds.pop(name, None)
            self.entries.pop(name, None)  # its revision is new
        if accepted or self.claims.get(name, (0, 0))[:2] == (token, session):
            self.claims.pop(name, None)
        known = self.core.stats()["entries"]
        entry = Commitment(name, generation, token, 1, 1.0, b"")
        answer = self._send(peer, Commit(TERM, session, 1, [CommitGroup(SCOPE, [entry])]))
        assert isinstance(answer, Committed)
        assert (answer.results[0] in (CommitStatus.STORED, CommitStatus.DUPLICATE)) == accepted
        assert (answer.results[0] is CommitStatus.STORED) == (self.core.stats()["entries"] > known)
        if accepted:
            found = self._send(peer, Lookup(TERM, session, 1, group(name)))
            assert isinstance(found, Found)
            (hit,) = found.results
            assert hit is not None
            assert self.entries.setdefault(name, hit.revision) == hit.revision

    @rule(peer=peers, name=names, stale=st.booleans())
    def report(self, peer: bytes, name: str, stale: bool) -> None:
        session = self._session(peer)
        if session is not None and name in self.entries:
            self._send(peer, Report(TERM, session, [Missing(SCOPE, mm_digest(name), self.entries[name] - stale)]))
            if not stale:
                del self.entries[name]

    @rule(peer=peers, polite=st.booleans())
    def session_ends(self, peer: bytes, polite: bool) -> None:
        if (session := self._session(peer)) is not None:
            self._end_session(peer, knows=polite)
            if polite:
                self._send(peer, Goodbye(TERM, session))
            else:
                self._read(self.core.unreachable(peer, self.now), None)

    # What holds at all times

    @invariant()
    def nobody_waits_where_nobody_computes(self) -> None:
        self._pass_time()
        self._read(self.core.tick(self.now), None)
        assert {name for name, _ in self.waits.values()} <= set(self.claims)

    @invariant()
    def tables_hold_what_lives(self) -> None:
        stats = self.core.stats()
        waiting = {(session, request, name) for (session, request, _), (name, _) in self.waits.items()}
        sizes = [len(table) for table in (self.sessions, self.entries, self.claims, waiting, self.holds)]
        assert [stats[name] for name in ("sessions", "entries", "claims", "waiters", "holds")] == sizes

    def teardown(self) -> None:
        self.now += 1000.0
        self._pass_time()
        self._read(self.core.tick(self.now), None)
        self.tables_hold_what_lives()
        assert self.core.next_deadline() is None
        assert not self.core._entries.claims._parties
        assert not self.core._entries.claims._by_token


CoreAgainstModel.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestCoreAgainstModel = CoreAgainstModel.TestCase
