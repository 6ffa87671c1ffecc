"""What the core makes of a listing of the store: what is forgotten, what is removed, and what is left alone."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from controller_driver import LINEAGE, SCOPE, World
from hypothesis import given
from hypothesis import strategies as st

from mmcache.control.messages import Commitment, Granted, Hit
from mmcache.controller.durable import Past
from mmcache.controller.reconciliation import RECORD
from mmcache.key import Scope, mm_digest, store_name_of
from mmcache.selector import Selector

NAMES = "abcdefgh"


def name_of(mm_hash: str, scope: Scope = SCOPE) -> bytes:
    return scope.digest + mm_digest(mm_hash)


def records(mm_hashes: Iterable[str], generation: int = 0, scope: Scope = SCOPE) -> bytes:
    return b"".join(RECORD.pack(name_of(mm_hash, scope), generation) for mm_hash in mm_hashes)


def sweep(world: World, most: int = 1000) -> int:
    """Sweep to the end; how often that took."""
    turns = 1
    while world.core.reconciliation.sweep(most):
        turns += 1
    return turns


def list_all(world: World, *pieces: bytes) -> None:
    world.core.reconciliation.begin()
    for piece in pieces:
        world.core.reconciliation.saw(piece)
    sweep(world)


def test_what_the_store_has_no_more_is_forgotten() -> None:
    world = World()
    client = world.client("c")
    client.put(*NAMES)
    list_all(world, records("abc"), records("d"))
    assert [mm_hash for mm_hash in NAMES if isinstance(client.lookup(mm_hash)[0], Hit)] == list("abcd")
    assert world.stats("entry.lost", "listing", "store_entries", "store_unknown", "entries") == (4, 1, 4, 0, 4)
    assert isinstance(client.acquire("e")[0], Granted)


@given(st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES)), st.data())
def test_only_what_did_not_change_since_is_judged(
    before: set[str], listed: set[str], meanwhile: set[str], data: st.DataObject
) -> None:
    world = World()
    client = world.client("c")
    client.commit(*sorted(before))
    world.core.reconciliation.begin()
    pieces = sorted(listed)
    cut = data.draw(st.integers(0, len(pieces)))
    world.core.reconciliation.saw(records(pieces[:cut]))
    client.commit(*sorted(meanwhile))  # seen in the store by a client, if not by the listing
    world.core.reconciliation.saw(records(pieces[cut:]))
    sweep(world, most=data.draw(st.integers(1, 9)))
    known = {mm_hash for mm_hash in NAMES if isinstance(client.lookup(mm_hash)[0], Hit)}
    assert known == (before & listed) | meanwhile


def test_a_sweep_goes_on_where_the_last_one_ended() -> None:
    world = World()
    world.client("c").put(*NAMES)
    world.core.reconciliation.begin()
    assert sweep(world, most=3) == 3
    assert world.stats("entries", "entry.lost") == (0, 8)


def test_a_listing_that_was_given_up_changes_nothing() -> None:
    world = World()
    world.client("c").put(*NAMES)
    world.core.reconciliation.begin()
    world.core.reconciliation.saw(records("a"))
    world.core.reconciliation.begin()
    world.core.reconciliation.saw(records("bcdefgh"))
    assert world.stats("entries", "listing") == (8, 0)
    sweep(world)
    assert world.stats("entries", "listing", "store_entries") == (7, 1, 7)


def test_what_is_claimed_is_left_alone() -> None:
    world = World()
    client = world.client("c")
    client.put("a")
    world.core._entries.claims.acquire(
        [name_of("a")], [None], [0], client.session, 77, wait_until=world.now, now=world.now
    )
    list_all(world)
    assert world.stats("entries", "entry.lost") == (1, 0)


def test_names_of_old_generations_are_removed_and_no_others() -> None:
    world = World(Past(LINEAGE, scopes=[SCOPE], head=5, held=[(5, Selector(mm_hash="a"))]))
    other = Scope("default", "another", "v1", None, "image")
    world.core.take_removals(world.now)
    list_all(world, records("a", 4), records("a", 5), records("a", 6), records("b", 0), records("c", 4, other))
    assert world.core.take_removals(world.now) == [store_name_of(name_of("a"), lineage=LINEAGE, generation=4)]
    assert world.stats("listed.outdated", "store_entries", "store_unknown") == (1, 5, 4)


def test_what_waits_to_be_removed_is_not_added_again() -> None:
    world = World(Past(LINEAGE, scopes=[SCOPE], head=5, held=[(5, Selector(mm_hash="a"))]))
    world.core.take_removals(world.now)
    for _ in range(3):
        list_all(world, records("a", 4))
    assert world.stats("listed.outdated", "removals") == (3, 1)


def test_half_a_record_is_refused() -> None:
    world = World()
    world.core.reconciliation.begin()
    with pytest.raises(ValueError, match="records: 71 bytes"):
        world.core.reconciliation.saw(records("a")[:-1])


def described(mm_hash: str, generation: int = 0, *, cost_ms: float = 3.5) -> Commitment:
    return Commitment(mm_hash, generation, 0, 5000, cost_ms, b"i")


def after_a_restart() -> World:
    return World(Past(LINEAGE, scopes=[SCOPE], head=5, held=[(5, Selector(mm_hash="a"))]))


def test_what_is_looked_up_while_the_directory_is_read_back_comes_first() -> None:
    world = after_a_restart()
    client = world.client("c")
    list_all(world, records("bcdef"))
    reconciliation = world.core.reconciliation
    assert client.lookup("f") == [None]
    assert reconciliation.take_unread(1) == records("b"), "nobody waits for it before the first ones are taken"
    assert client.lookup("e", "b", "f") == [None] * 3
    assert reconciliation.take_unread(2) == records("eb")
    assert reconciliation.take_unread(2) == records("fc")
    assert reconciliation.read(records("f"), described("f"), "encoder 1", 77.0, world.now)
    assert [hit is not None for hit in client.lookup("f", "d")] == [True, False]
    assert reconciliation.take_unread(10) == records("d") + records("def")
    assert reconciliation.take_unread(10) == b""
    assert not reconciliation.read(records("f"), described("f"), "encoder 1", 77.0, world.now), "it came once more"
    client.lookup("z")
    assert reconciliation.take_unread(10) == b"", "there is nothing to be read any more"


def test_what_the_directory_lacks_is_read_and_entered() -> None:
    world = after_a_restart()
    client = world.client("c")
    client.put("c")
    list_all(world, records("bc") + records("a", 5) + records("a", 4) + records("d", 1))
    reconciliation = world.core.reconciliation
    unread = [reconciliation.take_unread(1), reconciliation.take_unread(5)]
    assert unread == [records("b"), records("a", 5)]
    assert reconciliation.take_unread(1) == b""
    assert reconciliation.read(records("b"), described("b"), "encoder 1", 77.0, world.now)
    assert reconciliation.read(records("a", 5), described("a", 5), "encoder 2", 78.0, world.now)
    assert [isinstance(answer, Hit) for answer in client.acquire("a", "b", "c")] == [True] * 3
    told = {}
    for mm_hash in "ab":
        entry = world.core._entries.directory.entry(name_of(mm_hash))
        assert entry is not None
        told[mm_hash] = (entry.hit.generation, entry.hit.nbytes, entry.cost_ms, entry.producer, entry.created)
    assert told["b"] == (0, 5000, 3.5, "encoder 1", 77.0)
    assert told["a"] == (5, 5000, 3.5, "encoder 2", 78.0)
    assert world.stats("entry.found", "store_entries", "store_unknown") == (2, 5, 1)


def test_what_changed_while_it_was_read_is_not_entered() -> None:
    world = after_a_restart()
    client = world.client("c")
    list_all(world, records("bcde"))
    reconciliation = world.core.reconciliation
    assert reconciliation.take_unread(9) == records("bcde")
    client.put("b")
    (hit,) = client.lookup("b")
    client.claim("c")
    client.invalidate(Selector(mm_hash="d"))
    assert [reconciliation.read(records(one), described(one), "p", 7.0, 7.0) for one in "bcd"] == [False] * 3
    assert not reconciliation.read(records("e"), described("e", 1), "p", 7.0, 7.0)
    assert client.lookup("b", "c", "d", "e") == [hit, None, None, None]


def test_where_the_directory_is_full_nothing_is_read() -> None:
    world = World(Past(LINEAGE, scopes=[SCOPE]), max_entries=2)
    client = world.client("c")
    list_all(world, records("abc"))
    client.put("d")
    reconciliation = world.core.reconciliation
    assert reconciliation.take_unread(3) == records("ab"), "which is all that fits"
    assert [reconciliation.read(records(one), described(one), "p", 7.0, 7.0) for one in "ab"] == [True, False]
    assert reconciliation.take_unread(2) == b""


@given(st.lists(st.integers(0, 200), min_size=1, unique=True), st.data())
def test_names_are_all_that_are_there_throughout_and_each_once(numbers: list[int], data: st.DataObject) -> None:
    """However many come and go while somebody goes through them: what an invalidation outdates must be forgotten."""
    world = World()
    client = world.client("c")
    client.put(*map(str, numbers))
    directory = world.core._entries.directory
    there = {name_of(str(number)) for number in numbers}
    seen: list[bytes] = []
    for name in directory.names():
        seen.append(name)
        if data.draw(st.booleans(), "one goes"):
            gone = data.draw(st.sampled_from(sorted(there)), "which") if there else name
            if (entry := directory.entry(gone)) is not None:
                directory.drop(gone, entry.hit.revision)
            there.discard(gone)
        if data.draw(st.booleans(), "one comes") and len(seen) < 300:
            client.put(str(1000 + len(seen)))
    assert len(seen) == len(set(seen))
    assert there <= set(seen)
