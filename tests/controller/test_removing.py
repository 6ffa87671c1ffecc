"""What sessions hear of an entry on its way out, and that its removal takes nothing that was published since."""

from __future__ import annotations

import pytest
from controller_driver import LINEAGE, SCOPE, TERM, Client, World

from mmcache.control.messages import (
    Commit,
    CommitGroup,
    Commitment,
    CommitStatus,
    Committed,
    Granted,
    Hit,
    MalformedMessage,
    Unclaimed,
    Waiting,
)
from mmcache.controller.capacity.evictions import DOUBTED_S, WAIT_S
from mmcache.controller.reconciliation import RECORD
from mmcache.controller.removals import BATCH
from mmcache.controller.sessions import DRIFT_BOUND
from mmcache.key import mm_digest, store_name_of
from mmcache.selector import Selector
from mmcache.store.base import Outcome

CAPACITY = 100_000
LEASE_S = 1.0
REMOVING, CLAIMED, INVALIDATED = Unclaimed("removing"), Unclaimed("claimed"), Unclaimed("invalidated")


def name_of(mm_hash: str) -> bytes:
    return SCOPE.digest + mm_digest(mm_hash)


def object_of(mm_hash: str, generation: int = 0) -> str:
    return store_name_of(name_of(mm_hash), lineage=LINEAGE, generation=generation)


def tick(world: World) -> None:
    world.deliver(world.core.tick(world.now) + world.write())


def with_chosen(*mm_hashes: str, **limits: int) -> tuple[World, Client]:
    """A world where these entries are to go, and a client."""
    world = World(**{"ttl_ms": 600_000, "lease_ms": round(LEASE_S * 1000), **limits})
    client = world.client("c")
    world.core.take_removals(world.now)
    client.put(*mm_hashes)
    choose(world)
    assert world.stats("entries_removing", "entries") == (len(mm_hashes), len(mm_hashes))
    return world, client


def choose(world: World) -> None:
    """All that is there is to go."""
    world.advance(LEASE_S)
    world.core.room.measured(1, CAPACITY, world.now)  # all is too much
    tick(world)
    world.core.room.measured(CAPACITY, 0, world.now)


def with_out(*mm_hashes: str, **limits: int) -> tuple[World, Client]:
    """A world from whose store these entries are being removed."""
    world, client = with_chosen(*mm_hashes, **limits)
    assert world.core.take_removals(world.now) == [object_of(mm_hash) for mm_hash in mm_hashes]
    return world, client


def end(world: World, *outcomes: Outcome) -> None:
    world.core.removed(outcomes, world.now)
    tick(world)


def test_what_is_chosen_is_kept_by_who_acquires_it() -> None:
    world, client = with_chosen("a", "b")
    [answer] = client.acquire("a")
    assert isinstance(answer, Hit)
    assert world.core.take_removals(world.now) == [object_of("b")]
    assert world.stats("eviction.cancelled") == (1,)


def test_and_by_who_looks_it_up_or_publishes_it_again() -> None:
    world, client = with_chosen("a", "b")
    assert client.lookup("a") != [None]
    assert client.commit("b") == [CommitStatus.DUPLICATE]
    assert world.core.take_removals(world.now) == []
    assert world.stats("eviction.cancelled", "entries_removing", "bytes_removing") == (2, 0, 0)


def test_what_is_out_is_waited_for_and_computed_once_when_it_is_gone() -> None:
    world, client = with_out("a")
    second = world.client("d")
    assert client.acquire("a", request=100) == [Waiting()]
    assert second.acquire("a", request=200) == [Waiting()]
    end(world, Outcome.OK)
    [(request, position, granted)] = client.resolved()
    assert (request, position) == (100, 0)
    assert isinstance(granted, Granted)
    assert second.resolved() == [], "it waits for the first"
    assert client.commit("a", tokens=[granted.token]) == [CommitStatus.STORED]
    [(_, _, hit)] = second.resolved()
    assert isinstance(hit, Hit)
    assert world.stats("evicted.watermark", "claims", "waiters", "entries") == (1, 0, 0, 1)


def test_what_was_gone_already_is_as_good_as_removed() -> None:
    world, client = with_out("a")
    client.acquire("a")
    end(world, Outcome.NOT_FOUND)
    [(_, _, granted)] = client.resolved()
    assert isinstance(granted, Granted)


@pytest.mark.parametrize("outcome", [Outcome.LEASED, Outcome.IN_PROGRESS, Outcome.FAILED])
def test_what_stays_is_a_hit_for_all_who_waited(outcome: Outcome) -> None:
    world, client = with_out("a")
    second = world.client("d")
    client.acquire("a")
    second.acquire("a")
    end(world, outcome)
    for one in (client, second):
        [(_, _, hit)] = one.resolved()
        assert isinstance(hit, Hit)
    assert world.stats("claims", "entries", "entries_removing") == (0, 1, 0)
    assert isinstance(client.acquire("a")[0], Hit)


@pytest.mark.parametrize("outcome", [Outcome.UNAVAILABLE, Outcome.TIMED_OUT])
def test_what_nobody_knows_of_is_computed_without_a_claim_until_it_was_removed_again(outcome: Outcome) -> None:
    world, client = with_out("a")
    client.acquire("a")
    end(world, outcome)
    assert [result for _, _, result in client.resolved()] == [REMOVING]
    assert client.acquire("a") == [REMOVING]
    assert client.lookup("a") == [None]
    assert client.commit("a") == [CommitStatus.REFUSED]
    world.advance(1.0)
    assert world.core.take_removals(world.now) == [object_of("a")]
    assert client.acquire("a") == [Waiting()]
    end(world, Outcome.NOT_FOUND)
    [(_, _, granted)] = client.resolved()
    assert isinstance(granted, Granted)


def test_an_outcome_that_does_not_come_is_not_waited_for() -> None:
    world, client = with_out("a")
    client.acquire("a")
    world.advance(WAIT_S - 0.01)
    assert client.resolved() == []
    world.advance(0.01)
    assert [result for _, _, result in client.resolved()] == [REMOVING]
    assert client.acquire("a") == [REMOVING]
    assert world.stats("claims", "waiters") == (0, 0)
    end(world, Outcome.LEASED)
    assert isinstance(client.acquire("a")[0], Hit)


def test_a_batch_of_which_nobody_knows_is_unsure() -> None:
    world, client = with_out("a")
    client.acquire("a")
    assert world.core.take_removals(world.now) == [], "there is a pause first"
    tick(world)
    assert [result for _, _, result in client.resolved()] == [REMOVING]
    world.advance(1.0)
    assert world.core.take_removals(world.now) == [object_of("a")]


def test_who_does_not_wait_is_told_so_and_nothing_is_left_of_it() -> None:
    world, client = with_out("a")
    assert client.acquire("a", wait_ms=0) == [CLAIMED]
    assert world.stats("claims") == (1,)
    end(world, Outcome.OK)
    assert (client.resolved(), world.stats("claims", "waiters")) == ([], (0, 0))
    assert isinstance(client.acquire("a", wait_ms=0)[0], Granted)


def test_whose_wait_is_over_gets_no_claim() -> None:
    world, client = with_out("a")
    client.acquire("a", wait_ms=300)
    world.advance(0.5)
    assert world.stats("waiters") == (0,)
    end(world, Outcome.OK)
    assert (client.resolved(), world.stats("claims")) == ([], (0,))


def test_a_repeated_request_waits_once_and_a_key_that_stands_twice_is_answered_twice() -> None:
    world, client = with_out("a", "b")
    assert client.acquire("a", "b", "a", request=9) == [Waiting()] * 3
    assert client.acquire("a", "b", "a", request=9) == [Waiting()] * 3
    end(world, Outcome.OK, Outcome.LEASED)
    results = {position: type(result) for _, position, result in client.resolved()}
    assert results == {0: Granted, 1: Hit, 2: Granted}
    assert world.stats("claims", "waiters") == (1, 0)


def test_where_no_claim_fits_nobody_waits() -> None:
    world, client = with_out("a", max_claims=1)
    client.claim("b")
    assert client.acquire("a") == [Unclaimed("overloaded")]
    end(world, Outcome.OK)
    assert world.stats("claims") == (1,)


def test_an_invalidation_meanwhile_ends_the_wait_and_the_outcome_is_of_another_generation() -> None:
    world, client = with_out("a")
    client.acquire("a")
    client.invalidate(Selector(mm_hash="a"))
    client.pushes()
    assert [result for _, _, result in client.resolved()] == [INVALIDATED]
    client.apply(1)
    [granted] = client.acquire("a")
    assert isinstance(granted, Granted)
    assert client.commit("a", tokens=[granted.token], generation=1) == [CommitStatus.STORED]
    end(world, Outcome.OK)
    [hit] = client.acquire("a")
    assert isinstance(hit, Hit)
    assert hit.generation == 1
    assert world.stats("entries", "bytes_removing", "claims") == (1, 0, 0)
    assert client.commit("a", generation=1) == [CommitStatus.DUPLICATE]


def test_who_has_left_gets_no_claim_and_the_next_does() -> None:
    world, client = with_out("a")
    second = world.client("d")
    client.acquire("a", request=9)
    second.acquire("a")
    client.leave(9)
    end(world, Outcome.OK)
    [(_, _, granted)] = second.resolved()
    assert isinstance(granted, Granted)
    assert client.resolved() == []


@pytest.mark.parametrize("knows", [True, False])
def test_a_session_that_ends_before_it_hears_of_the_outcome_leaves_its_claim_to_the_next(knows: bool) -> None:
    world, client = with_chosen("a", ttl_ms=5000)
    second = world.client("d")
    ends = 1000.0 + 5.0 * (1 + DRIFT_BOUND)
    world.advance(ends - 0.5 - world.now)
    world.core.take_removals(world.now)
    assert client.acquire("a") == second.acquire("a") == [Waiting()]
    world.core.removed([Outcome.OK], world.now)
    if knows:
        client.goodbye()  # at the same time, before the outcome is told
    else:
        world.now = ends + 0.1
    tick(world)
    assert world.stats("session.left", "session.expired") == (knows, not knows)
    [(_, _, granted)] = second.resolved()
    assert isinstance(granted, Granted)
    assert client.resolved() == []


def test_a_commit_while_it_is_out_may_be_of_the_bytes_that_go() -> None:
    world, client = with_out("a")
    assert client.commit("a") == [CommitStatus.REFUSED]
    end(world, Outcome.OK)
    assert world.stats("entries") == (0,)


def test_a_commit_lately_after_it_left_is_taken_with_a_live_claim_only() -> None:
    world, client = with_out("a", "b")
    end(world, Outcome.OK, Outcome.OK)
    second = world.client("d")
    token = client.claim("a")
    world.advance(1.0)
    assert second.commit("a") == [CommitStatus.REFUSED]
    assert second.commit("a", tokens=[token + 1000]) == [CommitStatus.REFUSED]
    assert client.commit("a", tokens=[token]) == [CommitStatus.STORED]
    assert second.commit("a") == [CommitStatus.DUPLICATE], "it is back"
    assert second.commit("b") == [CommitStatus.REFUSED]
    world.advance(DOUBTED_S - 1.0)
    assert second.commit("b") == [CommitStatus.STORED]


def test_the_number_of_a_claim_that_is_another_sessions_or_nobodys_proves_nothing() -> None:
    world, client = with_out("a")
    assert client.acquire("a") == [Waiting()]
    for token in range(10):  # one is of what is kept for nobody while the removal is out
        assert client.commit("a", tokens=[token]) == [CommitStatus.REFUSED]
    end(world, Outcome.OK)
    [(_, _, granted)] = client.resolved()
    assert isinstance(granted, Granted)
    second = world.client("d")
    assert second.commit("a", tokens=[granted.token]) == [CommitStatus.REFUSED]
    assert client.commit("a", tokens=[granted.token]) == [CommitStatus.STORED]


def test_a_claim_that_has_ended_proves_nothing() -> None:
    world, client = with_out("a", claim_ms=1000)
    end(world, Outcome.OK)
    token = client.claim("a")
    world.advance(1.5)
    assert client.commit("a", tokens=[token]) == [CommitStatus.REFUSED]


def test_what_was_read_of_a_listing_may_be_from_before_the_removal() -> None:
    world, _ = with_out("a")
    reconciliation = world.core.reconciliation
    record = RECORD.pack(name_of("a"), 0)
    entry = Commitment("a", 0, 0, 5000, 1.0, b"")
    end(world, Outcome.OK)
    assert not reconciliation.read(record, entry, "p", world.now, world.now)
    world.advance(DOUBTED_S)
    assert reconciliation.read(record, entry, "p", world.now, world.now)


def test_what_a_reader_misses_while_it_is_out_is_forgotten_and_waited_for_all_the_same() -> None:
    world, client = with_chosen("a")
    [hit] = client.lookup("a")
    assert hit is not None
    choose(world)
    assert world.core.take_removals(world.now) == [object_of("a")]
    client.report("a", hit.revision)
    assert world.stats("entries", "entries_removing", "bytes_removing") == (0, 1, 0)
    assert client.acquire("a") == [Waiting()]
    end(world, Outcome.LEASED)
    [(_, _, granted)] = client.resolved()
    assert isinstance(granted, Granted), "nobody knows what it is, and its name is free"
    assert client.commit("a", tokens=[granted.token]) == [CommitStatus.STORED]


def test_old_names_and_evicted_ones_go_together_and_each_outcome_finds_its_own() -> None:
    world, client = with_chosen("a", "b")
    client.put("c")
    client.invalidate(Selector(mm_hash="c"))
    client.apply(1)
    world.advance(0.1)
    assert world.core.take_removals(world.now) == [object_of("c"), object_of("a"), object_of("b")]
    end(world, Outcome.OK, Outcome.LEASED, Outcome.OK)
    assert world.stats("removed", "evicted.watermark", "eviction.leased", "entries") == (1, 1, 1, 1)
    assert client.lookup("a") != [None]


def test_however_many_old_names_wait_what_is_unsure_is_sent_again() -> None:
    world, _ = with_out("a")
    end(world, Outcome.TIMED_OUT)
    for number in range(3 * BATCH):
        world.core.removals.add(number.to_bytes(64, "big"), 0)
    world.advance(1.0)
    taken = world.core.take_removals(world.now)
    assert len(taken) == BATCH // 2 + 1
    assert taken[-1] == object_of("a")


def commit_of(client: Client, nbytes: int, token: int = 0) -> Commit:
    entries = [Commitment("a", 0, token, nbytes, 1.0, b"")]
    return Commit(TERM, client.session, next(client.requests), [CommitGroup(SCOPE, entries)])


@pytest.mark.parametrize("nbytes", [0, (1 << 47) + 1])
def test_a_size_that_no_object_has_is_malformed(nbytes: int) -> None:
    client = World().client("c")
    with pytest.raises(MalformedMessage):
        client.ask(commit_of(client, nbytes))


def test_the_largest_size_is_known_and_one_that_the_store_cannot_have_is_refused() -> None:
    world = World()
    client, second = world.client("c"), world.client("d")
    answer = client.ask(commit_of(client, 1 << 47))
    assert isinstance(answer, Committed)
    assert answer.results == [CommitStatus.STORED]
    world.core.room.measured(CAPACITY, 0, world.now)
    [hit] = client.lookup("a")
    assert hit is not None
    client.report("a", hit.revision)
    token = client.claim("a")
    second.acquire("a")
    answer = client.ask(commit_of(client, CAPACITY + 1, token))
    assert isinstance(answer, Committed)
    assert answer.results == [CommitStatus.REFUSED]
    assert [result for _, _, result in second.resolved()] == [Unclaimed("no_room")]
