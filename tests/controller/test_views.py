"""What an operator may see of a core: every entry on one page, few looked at in one call, none that is stale."""

from __future__ import annotations

import pytest
from controller_driver import SCOPE, TERM, Client, World

from mmcache.control.messages import Commit, CommitGroup, Commitment, CommitStatus, Committed, Invalidated
from mmcache.controller import views as views_module
from mmcache.controller.shelves import Shelves, place
from mmcache.controller.views import START, Wanted
from mmcache.key import EmbeddingKey, Scope, mm_digest
from mmcache.selector import Selector

EVERYTHING = Wanted()
OTHER = Scope("tenant", "siglip", "v2", "adapter", "video")


def put(client: Client, scope: Scope, *mm_hashes: str, generation: int = 0) -> None:
    entries = [Commitment(mm_hash, generation, 0, 5000, 1.5, b"i") for mm_hash in mm_hashes]
    answer = client.ask(Commit(TERM, client.session, next(client.requests), [CommitGroup(scope, entries)]))
    assert isinstance(answer, Committed)
    assert set(answer.results) == {CommitStatus.STORED}


def listed(world: World, wanted: Wanted = EVERYTHING, limit: int = 10) -> list[str]:
    found: list[str] = []
    after: bytes | None = START
    while after is not None:
        entries, after = world.core.views.entries(wanted, after, limit)
        assert len(entries) <= limit
        found += [entry.key.mm_hash for entry in entries]
    return found


def counted(world: World, wanted: Wanted) -> int:
    count = 0
    after: bytes | None = START
    while after is not None:
        some, after = world.core.views.count(wanted, after)
        count += some
    return count


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_each_entry_is_on_one_page(limit: int) -> None:
    world = World()
    names = [f"item-{number}" for number in range(300)]
    world.client("c").put(*names)
    found = listed(world, limit=limit)
    assert sorted(found) == sorted(names)
    assert found == sorted(names, key=mm_digest)
    assert counted(world, Wanted()) == 300


def test_pages_hold_what_stays_while_other_entries_come_and_go() -> None:
    world = World()
    client = world.client("c")
    client.put(*(f"stays-{number}" for number in range(100)), *(f"goes-{number}" for number in range(100)))
    found: list[str] = []
    after: bytes | None = START
    for number in range(1000):
        if after is None:
            break
        entries, after = world.core.views.entries(Wanted(), after, 3)
        found += [entry.key.mm_hash for entry in entries]
        if number < 100:
            [hit] = client.lookup(f"goes-{number}")
            assert hit is not None
            client.report(f"goes-{number}", hit.revision)
            client.put(f"comes-{number}")
    stays = [name for name in found if name.startswith("stays")]
    assert sorted(stays) == sorted(f"stays-{number}" for number in range(100))
    assert len(set(found)) == len(found)


def test_filters_narrow_by_every_field_producer_and_time() -> None:
    world = World()
    world.client("one").put("a", "b")
    world.advance(10)
    put(world.client("two"), OTHER, "a", "c")
    for selector, names in (
        (Selector(), "aabc"),
        (Selector(tenant="tenant"), "ac"),
        (Selector(model="siglip"), "aabc"),
        (Selector(version="v1"), "ab"),
        (Selector(lora=None), "ab"),
        (Selector(lora="adapter"), "ac"),
        (Selector(modality="video"), "ac"),
        (Selector(mm_hash="a"), "aa"),
        (Selector(mm_hash="a", version="v2"), "a"),
        (Selector(mm_hash="x"), ""),
        (Selector(model="other"), ""),
    ):
        assert "".join(sorted(listed(world, Wanted(selector)))) == names
        assert counted(world, Wanted(selector)) == len(names)
    assert sorted(listed(world, Wanted(producer="one"))) == ["a", "b"]
    assert sorted(listed(world, Wanted(created_from=1005.0))) == ["a", "c"]
    assert sorted(listed(world, Wanted(created_until=1005.0))) == ["a", "b"]
    assert listed(world, Wanted(created_from=1001.0, created_until=1005.0)) == []


def test_what_was_invalidated_is_not_there() -> None:
    world = World()
    client = world.client("c")
    client.put("a", "b")
    key = EmbeddingKey("siglip", "v1", "a")
    [known] = world.core.views.lookup([key])
    assert known is not None
    name = SCOPE.digest + mm_digest("a")
    assert world.core.views.entry(name, 0) == known
    assert world.core.views.entry(name, 1) is None
    assert world.core.views.entry(bytes(64), 0) is None
    assert isinstance(client.invalidate(Selector(mm_hash="a")), Invalidated)
    assert listed(world) == ["b"]
    assert world.core.views.lookup([key]) == [None]
    assert world.core.views.entry(name, 0) is None
    put(client, SCOPE, "a", generation=1)
    assert sorted(listed(world)) == ["a", "b"]
    assert world.core.views.entry(name, 1) is not None


def test_one_call_looks_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    client = world.client("c")
    for start in range(0, 20_000, 1000):
        client.put(*(f"item-{number}" for number in range(start, start + 1000)))
    shelves = 0
    real = Shelves.names

    def names(self: Shelves, number: int, present: object) -> list[bytes]:
        nonlocal shelves
        shelves += 1
        return real(self, number, present)  # type: ignore[arg-type]

    monkeypatch.setattr(Shelves, "names", names)
    after: bytes | None = START
    calls = 0
    while after is not None:
        before = shelves
        count, after = world.core.views.count(Wanted(Selector(model="other")), after)
        assert count == 0
        assert shelves - before <= views_module.MOST_LOOKED_AT
        calls += 1
    assert shelves == 4096
    assert calls >= 24_096 // views_module.MOST_LOOKED_AT
    before = shelves
    assert counted(world, Wanted(Selector(mm_hash="item-7"))) == 1
    assert shelves == before + 1, "an mm_hash says where it is"


def test_shelves_forget_what_is_gone() -> None:
    shelves = Shelves()
    present: set[bytes] = set()
    for number in range(10_000):
        name = bytes(32) + bytes(2) + number.to_bytes(30, "big")  # all on the first shelf
        present = {name}
        shelves.add(name, present)
        shelves.add(name, present)
    assert shelves.names(0, present) == [name]
    assert len(shelves._shelves[0]) <= 40 * 64
    assert place(name) == bytes(2) + (9_999).to_bytes(30, "big") + bytes(32)


def test_sessions_that_ended_are_there_until_their_clients_know() -> None:
    world = World(ttl_ms=1000)
    one, other = world.client("one"), world.client("other")
    one.heartbeat()
    world.deliver(world.core.unreachable(other.peer, world.now))
    found = {session.name: session for session in world.core.views.sessions(0, 10)}
    assert (found["one"].live, found["other"].live) == (True, False)
    assert found["other"].trusted_until == pytest.approx(world.now + 1.05)
    assert [session.number for session in world.core.views.sessions(0, 1)] == [one.session]
    assert [session.name for session in world.core.views.sessions(one.session, 10)] == ["other"]
    one.goodbye()
    world.advance(2)
    assert world.core.views.sessions(0, 10) == []
