"""What callers do, in steps: gets, publications by mark and by claim, and invalidations followed to their end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from mmcache.client.names import NamedKey
from mmcache.control.batches import (
    AbandonEntry,
    CommitEntry,
    abandoned_batches,
    commit_batches,
    key_batches,
    missing_batches,
)
from mmcache.control.calls import Acquisition, Call
from mmcache.control.messages import (
    CLAIMED,
    INVALIDATED,
    AbandonReason,
    AbortReason,
    Answer,
    CommitStatus,
    Granted,
    Hit,
    Invalidated,
    PinAnswer,
    PinSubject,
    Progress,
    Resolution,
    Unclaimed,
)
from mmcache.key import EmbeddingKey
from mmcache.selector import Selector
from mmcache.store.base import Outcome

from .client import Client, Steps, Until, over, resolved
from .store import Publication

if TYPE_CHECKING:
    from .world import World

READ_S, WAIT_S, TRY_S = 2.0, 3.0, 1.0
"""How long an answer, another's result, and one attempt of an operator's may take."""


class Work:
    """The calls that clients make."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._numbers = itertools.count(1)
        self.operators: dict[int, Client] = {}
        """Who has asked for an invalidation and not heard yet that it is complete."""

    # Reading

    def get(self, client: Client, key: EmbeddingKey) -> Steps[Publication | None]:
        """`MMCache.get`."""
        started = self._world.events.now
        self._world.count("get")
        view = client.fresh()
        if view is None:
            self._world.count("get not fresh")
            return None
        yield from self._pause()
        named = client.names(view, key)
        yield from self._pause()
        return (yield from self._read(client, named, started))

    def _read(self, client: Client, named: NamedKey, started: float) -> Steps[Publication | None]:
        """Read a name, from memory or the store; what was found is returned to the caller, who asked at `started`."""
        world = self._world
        found = client.local.get(named.name)
        if found is None:
            found = world.store.read(named.name, world.events.now)
            yield from self._pause()
        if found is not None and not client.serves_stale:
            if found.lineage == named.lineage and world.chance(0.3):
                client.remember(named.name, found)
            name = NamedKey.of(found.key, found.lineage, found.generation).name
            world.count("hit")
            world.say(
                client.name, f"returns {world.label(named.key)} generation {found.generation} content {found.content}"
            )
            world.checker.returned(named.key, named.name, name, found, started)
        elif found is None:
            world.say(client.name, f"misses {world.label(named.key)} generation {named.generation}")
        return found

    # Publishing

    def put(self, client: Client, key: EmbeddingKey) -> Steps[bool]:
        """`mark`, encode, `put` with `since`; whether it was published."""
        world = self._world
        mark = client.mark()
        if mark is None:
            return False
        yield from self._pause()
        content = yield from self._encode(key)
        view = client.fresh()
        if view is None:
            return False
        yield from self._pause()
        named = client.names(view, key)
        if not mark.covers(named.lineage, named.generation):
            world.count("put invalidated")
            return False
        publication = Publication(key, named.lineage, named.generation, content, mark.at, client.name)
        if (yield from self._store(client, named, publication)) is not Outcome.OK:
            return False
        return (yield from self._commit(client, named, token=0))

    def get_or_compute(self, client: Client, key: EmbeddingKey) -> Steps[bool]:
        """`MMCache.get_or_compute` of one key; whether it ended as it should, with a hit or a publication."""
        world = self._world
        started = world.events.now
        world.count("get_or_compute")
        view = client.fresh()
        if view is None:
            return False
        named = client.names(view, key)
        if (yield from self._read(client, named, started)) is not None:
            return True
        for attempt in range(3):
            yield from self._pause()
            if not client.can_ask:
                return False
            asked_at = world.events.now
            acquisition = client.acquire(1, wait_s=WAIT_S if attempt else 0.0)
            client.do(lambda one=acquisition: client.exchange.acquire(one, key_batches([key])))  # type: ignore[misc]
            try:
                answer = yield from self._answer(client, acquisition)
                if isinstance(answer, Granted):
                    named = named.at(answer.generation, lineage=acquisition.lineage)
                    return (yield from self._compute(client, named, answer, asked_at))
                if isinstance(answer, Hit):
                    named = named.at(answer.generation, lineage=acquisition.lineage)
                    if (yield from self._read(client, named, started)) is not None:
                        return True
                    missing = missing_batches([(key, answer.revision)])
                    client.do(lambda what=missing: client.exchange.report(what))  # type: ignore[misc]
                elif not (isinstance(answer, Unclaimed) and answer.reason in (CLAIMED, INVALIDATED)):
                    return False  # it computes for itself
            finally:
                acquisition.leave()
        return False

    def _answer(self, client: Client, acquisition: Acquisition) -> Steps[Answer | Resolution | None]:
        yield Until(over(acquisition), READ_S)
        answers = client.outcome(acquisition)
        if answers is None:
            return None
        acquisition.answers = answers
        if isinstance(answers[0], Granted | Hit | Unclaimed):
            return answers[0]
        self._world.count("wait")
        yield Until(resolved(acquisition), WAIT_S)
        for _, resolution in acquisition.resolutions(0.0):
            return resolution
        return None

    def _compute(self, client: Client, named: NamedKey, claim: Granted, asked_at: float) -> Steps[bool]:
        """Compute under a claim, which ends whatever comes of it."""
        world = self._world
        since = world.events.now
        session = client.session.view
        world.count("claim")
        if session is not None:
            world.checker.claimed(named.key, session.lineage, claim.generation, asked_at)
        yield from self._pause()
        content = yield from self._encode(named.key)
        world.computed(named)
        if world.chance(world.weather.fails):
            client.do(lambda: client.exchange.abort([claim.token], AbortReason.FAILED))
            return False
        publication = Publication(named.key, named.lineage, named.generation, content, since, client.name)
        stored = yield from self._store(client, named, publication)
        if stored is Outcome.NO_SPACE:
            client.do(lambda: client.exchange.abort([claim.token], AbortReason.NO_ROOM))
            return False
        if stored is not Outcome.OK:
            held = abandoned_batches([AbandonEntry(named.key, named.generation, claim.token, AbandonReason.HELD)])
            world.count("name abandoned")
            client.do(lambda: client.exchange.abandon(held, named.lineage))
            return False
        return (yield from self._commit(client, named, token=claim.token))

    def _encode(self, key: EmbeddingKey) -> Steps[int]:
        """The content that is encoded, as it is at some time of it."""
        yield self._world.random.random() * 0.2
        content = self._world.content[key]
        yield from self._pause()
        return content

    def _store(self, client: Client, named: NamedKey, publication: Publication) -> Steps[Outcome]:
        """Put, and confirm that it is readable: OK, NO_SPACE or NOT_FOUND."""
        world = self._world
        yield from self._pause()
        stores = not world.chance(world.weather.put_nothing)
        if not world.store.put(named.name, publication, now=world.events.now, stores=stores):
            world.count("put without room")
            world.say(client.name, f"finds no room for {world.label(named.key)}")
            world.not_computed(named.name)
            return Outcome.NO_SPACE
        world.say(
            client.name, f"puts {world.label(named.key)} generation {named.generation} content {publication.content}"
        )
        yield from self._pause()
        if world.store.read(named.name, world.events.now) is None:
            world.count("put stored nothing")
            return Outcome.NOT_FOUND
        return Outcome.OK

    def _commit(self, client: Client, named: NamedKey, *, token: int) -> Steps[bool]:
        world = self._world
        if not client.can_ask:
            if token:
                client.do(lambda: client.exchange.abort([token], AbortReason.FAILED))
            return False
        item = world.items[named.key]
        entry = CommitEntry(named.key, named.generation, token, item.nbytes, item.cost_ms, b"info")
        call: Call[CommitStatus] = Call(1)
        client.do(lambda: client.exchange.commit(call, commit_batches([entry]), named.lineage))
        yield Until(over(call), READ_S)
        results = client.outcome(call)
        if results is None:
            client.do(lambda: client.exchange.forget(call))
            if token:
                client.do(lambda: client.exchange.abort([token], AbortReason.FAILED))
            return False
        world.count(f"commit {results[0].name.lower()}")
        return results[0] in (CommitStatus.STORED, CommitStatus.DUPLICATE)

    # Invalidating

    def invalidate(self, client: Client, selector: Selector) -> Steps[None]:
        """The content changes, then an operator invalidates it, and follows that until it is complete."""
        world = self._world
        asked = next(self._numbers)
        self.operators[asked] = client
        for key in world.content:
            if selector.matches(key):
                world.content[key] += 1
        world.say(client.name, f"invalidates {selector}, whose content has changed")
        yield from self._pause()
        idempotency = f"asked-{asked}"
        lineage, number = "", 0
        while not number:
            if client.can_ask:
                lineage = client.exchange._lineage
                call: Call[Invalidated] = Call(1)
                client.do(
                    lambda one=call, to=lineage: client.exchange.invalidate(one, selector, "changed", idempotency, to)
                )  # type: ignore[misc]
                yield Until(over(call), TRY_S)
                results = client.outcome(call)
                number = results[0].number if results is not None else 0
                client.do(lambda one=call: client.exchange.forget(one))  # type: ignore[misc]
            if not number:
                yield 0.4
        world.count("invalidation")
        while client.exchange._lineage == lineage:
            if client.can_ask:
                told: Call[Progress] = Call(1)
                client.do(lambda one=told: client.exchange.follow(one, number, 2000, lineage))  # type: ignore[misc]
                yield Until(over(told), 2 * TRY_S + 1.0)
                progress = client.outcome(told)
                client.do(lambda one=told: client.exchange.forget(one))  # type: ignore[misc]
                if progress is not None and progress[0].complete:
                    world.count("invalidation complete")
                    world.say(client.name, f"hears that invalidation {number} is complete")
                    break
            yield 0.4
        del self.operators[asked]

    # Pinning

    def pin(self, client: Client, selector: Selector) -> Steps[None]:
        """An operator has something kept for some seconds."""
        ttl_ms = self._world.random.choice((1_000, 3_000, 9_000))
        subject = PinSubject(selector, [])
        return (
            yield from self._ask_pins(
                client, "pin", lambda call, to: client.exchange.pin(call, subject, ttl_ms, "", to)
            )
        )

    def unpin(self, client: Client, selector: Selector) -> Steps[None]:
        """An operator ends a pin, if there is one."""
        subject = PinSubject(selector, [])
        return (
            yield from self._ask_pins(client, "unpin", lambda call, to: client.exchange.unpin(call, [], subject, to))
        )

    def _ask_pins(self, client: Client, what: str, ask: Callable[[Call[PinAnswer], str], None]) -> Steps[None]:
        if not client.can_ask:
            return
        call: Call[PinAnswer] = Call(1)
        lineage = client.exchange._lineage
        client.do(lambda: ask(call, lineage))
        yield Until(over(call), TRY_S)
        if (results := client.outcome(call)) is not None:
            self._world.count(f"{what} refused" if results[0].refusal else what)
        client.do(lambda: client.exchange.forget(call))

    def _pause(self) -> Steps[None]:
        """Between two steps anything may happen."""
        if seconds := self._world.pause():
            yield seconds
