"""What the directory has and what it saved is accounted for: in all, by tenant and by model, through it all."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest
from controller_driver import LINEAGE, SCOPE, TERM, Client, World, digests
from hypothesis import given
from hypothesis import strategies as st

from mmcache.control.messages import (
    MAX_USES,
    Commit,
    CommitGroup,
    Commitment,
    CommitStatus,
    Committed,
    MalformedMessage,
    Used,
    Uses,
)
from mmcache.controller.accounts import MOST_COST_MS, MOST_ROWS, OTHER, Account, Accounts, credible_ms
from mmcache.controller.directory import Directory
from mmcache.controller.entries import MOST_USES
from mmcache.controller.removals import Removals
from mmcache.key import DIGEST_BYTES, Scope, mm_digest
from mmcache.selector import Selector

SCOPES = [Scope(tenant, model, "1", None, "image") for tenant in ("t0", "t1", "t2") for model in ("m0", "m1", "m2")]
names = st.builds(
    lambda scope, name: (scope, name), st.sampled_from(SCOPES), st.binary(min_size=1, max_size=1).map(bytes.hex)
)
enters = st.tuples(st.just("enter"), names, st.integers(1, 1 << 40))
drops = st.tuples(st.just("drop"), names, st.booleans())
uses = st.tuples(st.just("use"), names, st.integers(1, MAX_USES))
others = st.sampled_from(["invalidate", "sweep"]).map(lambda word: (word, None, 0))


def summed(rows: dict[str, Account]) -> Account:
    total = Account()
    for row in rows.values():
        for field in Account.__struct_fields__:
            setattr(total, field, getattr(total, field) + getattr(row, field))
    return total


@given(st.lists(st.one_of(enters, drops, uses, others), max_size=60), st.integers(1, 4))
def test_the_sums_of_tenants_and_of_models_are_what_is_in_the_directory(steps: list, most_rows: int) -> None:
    scopes = {scope.digest: scope for scope in SCOPES}
    accounts = Accounts(scopes, most_rows=most_rows)
    removals = Removals(lineage=LINEAGE, lease_ms=1000, most=1000, counts=Counter())
    directory = Directory(max_entries=20, removals=removals)
    directory.watchers.append(accounts)
    generation = 0
    for step, named, number in steps:
        name = named[0].digest + mm_digest(named[1]) if named is not None else b""
        if step == "enter":
            directory.enter(name, Commitment(named[1], generation, 0, number, 2.0, b""), "p", 1.0)
        elif step == "drop":
            known = directory.entry(name)
            directory.drop(name, known.hit.revision + (not number) if known is not None else 1)
        elif step == "use":
            accounts.used(name[:DIGEST_BYTES], number, number * 1000, float(number))
            accounts.published(name[:DIGEST_BYTES], number, 3.0)
        elif step == "invalidate":
            generation += 1
            directory.outdate()
        else:
            directory.sweep(lambda _, now=generation: now, 3)
        entries: Counter[bytes] = Counter()
        nbytes: Counter[bytes] = Counter()
        for present in directory.names():
            entry = directory.entry(present)
            assert entry is not None
            entries[present[:DIGEST_BYTES]] += 1
            nbytes[present[:DIGEST_BYTES]] += entry.hit.nbytes
        assert (accounts.total.entries, accounts.total.nbytes) == (len(directory), nbytes.total())
        for rows, field in ((accounts.by_tenant, "tenant"), (accounts.by_model, "model")):
            assert summed(rows) == accounts.total
            assert len(rows) <= most_rows
            for value, row in rows.items():
                if value != OTHER:
                    assert row.nbytes == sum(
                        n for digest, n in nbytes.items() if getattr(scopes[digest], field) == value
                    )


def test_tenants_beyond_the_bound_share_one_account() -> None:
    scopes = [Scope(f"tenant-{number}", "m", "1", None, "image") for number in range(MOST_ROWS + 5)]
    accounts = Accounts({scope.digest: scope for scope in scopes})
    for scope in scopes:
        accounts.held(scope.digest, 1, 10)
    assert len(accounts.by_tenant) == MOST_ROWS
    assert accounts.by_tenant[OTHER].entries == 6
    assert accounts.by_model == {"m": accounts.total}


@pytest.mark.parametrize("cost_ms", [-1.0, math.nan, math.inf, -math.inf, 1e12, MOST_COST_MS + 1, 0.0])
def test_a_cost_that_cannot_be_counts_as_none(cost_ms: float) -> None:
    assert credible_ms(cost_ms) == 0.0
    assert credible_ms(MOST_COST_MS) == MOST_COST_MS


def test_no_figure_is_too_large_for_a_message() -> None:
    accounts = Accounts({SCOPE.digest: SCOPE})
    for _ in range(3):
        accounts.used(SCOPE.digest, MAX_USES, MAX_USES << 63, 1e300)
        accounts.held(SCOPE.digest, 1, (1 << 63) - 1)
    assert max(accounts.figures().values()) == (1 << 63) - 1


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def client(world: World) -> Client:
    return world.client("reader")


def tell(client: Client, counts: dict[str, int], *, missed: int = 0, scope: Scope = SCOPE) -> None:
    groups = [Uses(scope.digest, digests(*counts), list(counts.values()))] if counts else []
    before = len(client.inbox)
    client.tell(Used(TERM, client.session, groups, missed))
    assert len(client.inbox) == before, "it has no answer"


def publish(client: Client, mm_hash: str, nbytes: int, cost_ms: float, scope: Scope = SCOPE) -> None:
    entry = Commitment(mm_hash, client.world.core.views.head, 0, nbytes, cost_ms, b"")
    answer = client.ask(Commit(TERM, client.session, next(client.requests), [CommitGroup(scope, [entry])]))
    assert isinstance(answer, Committed)
    assert answer.results == [CommitStatus.STORED]


def test_what_clients_read_is_added_up_with_what_it_would_have_cost(client: Client, world: World) -> None:
    publish(client, "a", 1000, 5.0)
    publish(client, "b", 200, 0.5)
    client.commit("a")
    accessed: list[tuple[bytes, int]] = []
    world.core.room.accessed = lambda name, count: accessed.append((name, count))  # type: ignore[method-assign]
    tell(client, {"a": 3, "b": 4, "nobody has it": 9}, missed=2)
    tell(client, {"a": 1}, missed=5)
    figures = ("entries", "bytes", "hits", "missed", "hit_bytes", "saved_ms")
    assert world.stats(*figures) == (2, 1200, 8, 7, 4800, 22)
    assert world.stats("published", "published_bytes", "published_ms") == (2, 1200, 5), "a duplicate is none"
    assert world.stats("used.unknown") == (9,)
    name = SCOPE.digest + mm_digest("a")
    assert accessed == [(name, 3), (SCOPE.digest + mm_digest("b"), 4), (name, 1)]
    entry = world.core._entries.directory.entry(name)
    assert entry is not None
    assert entry.uses == 4


def test_uses_of_an_outdated_entry_of_unknown_scopes_and_without_a_session_are_not_counted(
    client: Client, world: World
) -> None:
    publish(client, "a", 1000, 5.0)
    tell(client, {"a": 1}, scope=Scope("another", "m", "1", None, "image"))
    client.invalidate(Selector(mm_hash="a"))
    client.inbox.clear()
    tell(client, {"a": 1})
    stranger = Used(TERM, client.session + 1, [Uses(SCOPE.digest, digests("a"), [1])], 1)
    world.core.handle(client.peer, stranger, world.now)
    assert world.stats("hits", "missed", "saved_ms", "hello_again") == (0, 0, 0, 1)


def test_a_publisher_that_lies_about_cost_saves_nothing(client: Client, world: World) -> None:
    for mm_hash, cost_ms in (("hours", 1e12), ("huge", 1e300), ("honest", 2.0)):
        publish(client, mm_hash, 10, cost_ms)
        tell(client, {mm_hash: 10})
    for cost_ms in (-1.0, math.nan):
        with pytest.raises(MalformedMessage):
            publish(client, "no number", 10, cost_ms)
    assert world.stats("hits", "saved_ms", "published_ms") == (30, 20, 2)


def test_an_entry_is_counted_no_further_than_a_number_goes(client: Client, world: World) -> None:
    publish(client, "a", 1, 1.0)
    entry = world.core._entries.directory.entry(SCOPE.digest + mm_digest("a"))
    assert entry is not None
    entry.uses = MOST_USES - 1
    tell(client, {"a": MAX_USES})
    assert entry.uses == MOST_USES
    msgspec.msgpack.encode(world.core.stats())


def test_tenants_and_models_have_accounts_of_their_own(client: Client, world: World) -> None:
    other = Scope("tenant-2", "siglip", "v1", None, "image")
    publish(client, "a", 100, 1.0)
    publish(client, "a", 30, 1.0, other)
    tell(client, {"a": 2}, scope=other)
    accounts = world.core._entries.accounts
    assert {name: (row.nbytes, row.hits) for name, row in accounts.by_tenant.items()} == {
        "default": (100, 0),
        "tenant-2": (30, 2),
    }
    assert {name: (row.nbytes, row.hit_bytes) for name, row in accounts.by_model.items()} == {"siglip": (130, 60)}
