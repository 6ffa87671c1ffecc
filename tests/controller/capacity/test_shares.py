"""Whose entries go: those of whom is furthest above what he is sure of; unused room is lent, and given back first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mmcache.capacity_rules import quota_of
from mmcache.controller.capacity.shares import Shares, Victim
from mmcache.controller.eviction import LeastRecentlyUsed
from mmcache.key import Scope

TENANTS = ("a", "b", "x", "y")
MODELS = ("m", "n")
SCOPES = {scope.digest: scope for scope in (Scope(one, two, "v", None, "image") for one in TENANTS for two in MODELS)}
_numbers = itertools.count()


def named(tenant: str, model: str = "m") -> bytes:
    """A name that was never there."""
    return Scope(tenant, model, "v", None, "image").digest + next(_numbers).to_bytes(32, "big")


def owner(name: bytes) -> tuple[str, str]:
    scope = SCOPES[name[:32]]
    return scope.tenant, scope.model


def shares_of(*quotas: str, capacity: int = 1000, room: float | None = None) -> Shares:
    shares = Shares(tuple(map(quota_of, quotas)), LeastRecentlyUsed, SCOPES)
    shares.resize(capacity, capacity if room is None else room)
    return shares


def fill(shares: Shares, tenant: str, nbytes: int, *, of: int = 10, model: str = "m") -> list[bytes]:
    names = [named(tenant, model) for _ in range(nbytes // of)]
    for name in names:
        shares.insert(name, of, 1.0)
    return names


def give_up(shares: Shares, number: int) -> Iterator[Victim]:
    for _ in range(number):
        victim = shares.choose()
        if victim is None:
            return
        shares.remove(victim.name)
        yield victim


def test_without_quotas_all_are_alike() -> None:
    shares = shares_of()
    names = [named(tenant, model) for tenant in TENANTS for model in MODELS]
    for name in names:
        shares.insert(name, 10, 1.0)
    shares.access(names[0], 1)
    victims = list(give_up(shares, 100))
    assert [victim.name for victim in victims] == [*names[1:], names[0]]
    assert not any(victim.borrowed for victim in victims)
    assert not shares.scaled
    assert shares.nbytes == 0


def test_unused_room_is_lent_and_given_back_by_who_borrowed_it() -> None:
    shares = shares_of("tenant=a 50%", "tenant=b 50%")
    borrowed = fill(shares, "a", 900)
    for _ in range(40):
        fill(shares, "b", 10)
        [victim] = give_up(shares, 1)
        assert victim == (borrowed.pop(0), True), "b has less than it is sure of"
    assert len(borrowed) == 50
    fill(shares, "b", 10)
    fill(shares, "b", 90)  # 500 each
    [victim] = give_up(shares, 1)
    assert not victim.borrowed, "nobody has more than he is sure of"
    fill(shares, "a", 100)
    fill(shares, "b", 20)
    [victim] = give_up(shares, 1)
    assert not victim.borrowed, "everybody has"


def test_a_share_of_the_capacity_is_of_what_may_be_used() -> None:
    shares = shares_of("tenant=a 60%", "tenant=b 40%", capacity=1000, room=500)
    fill(shares, "a", 310)
    fill(shares, "b", 190)
    assert not shares.scaled
    [victim] = give_up(shares, 1)
    assert (owner(victim.name)[0], victim.borrowed) == ("a", True), "which has 310 of 300, and b 190 of 200"


def test_those_without_a_quota_are_one_and_have_what_is_left() -> None:
    shares = shares_of("tenant=a 80%", room=900)
    fill(shares, "a", 700)
    for tenant in ("x", "y"):
        fill(shares, tenant, 60)
    victims = list(give_up(shares, 12))
    assert {owner(victim.name)[0] for victim in victims[:3]} == {"x"}, "they have 120 of 100, and a 700 of 800"
    assert [victim.borrowed for victim in victims[:3]] == [True, True, False]


def test_where_nothing_is_left_whoever_has_no_quota_goes_first() -> None:
    shares = shares_of("tenant=a 100%")
    fill(shares, "a", 990)
    fill(shares, "x", 10)
    assert [owner(victim.name)[0] for victim in give_up(shares, 2)] == ["x", "a"]


def test_quotas_of_more_than_there_is_count_for_less_in_proportion() -> None:
    shares = shares_of("tenant=a 1600B", "tenant=b 400B", room=900)
    assert shares.scaled
    fill(shares, "a", 700)  # of 720
    fill(shares, "b", 190)  # of 180
    assert [owner(victim.name)[0] for victim in give_up(shares, 1)] == ["b"]
    shares.resize(4000, 3600)
    assert not shares.scaled
    fill(shares, "a", 1000)  # of 1600
    assert [owner(victim.name)[0] for victim in give_up(shares, 1)] == ["a"]


def test_a_store_without_segments_is_of_no_room() -> None:
    shares = shares_of("tenant=a 50%", "model=m 400B")
    fill(shares, "a", 100)
    fill(shares, "x", 100)
    shares.resize(0, 0.0)
    assert shares.choose() is not None
    assert not shares.scaled, "lower quotas would not help"
    shares.resize(1000, 900)
    assert not shares.scaled


def test_a_group_is_within_its_tenants_or_its_models_quota() -> None:
    """Twice its tenant's, but four fifths of its model's: less than who is above neither and at one of them."""
    shares = shares_of("tenant=a 20%", "model=m 50%")
    fill(shares, "a", 400, model="m")
    fill(shares, "x", 800, model="n")
    assert [owner(victim.name) for victim in give_up(shares, 1)] == [("x", "n")]


def test_what_is_on_its_way_out_counts_no_more() -> None:
    shares = shares_of("tenant=a 50%", "tenant=b 50%")
    fill(shares, "a", 600)
    fill(shares, "b", 580)
    for whose in ("a", "a", "a", "b", "a", "b"):
        victim = shares.choose()
        assert victim is not None
        assert owner(victim.name)[0] == whose
        shares.leaving(victim.name, 10)
        last = victim.name
    shares.leaving(last, -10)
    shares.put_back(last)
    assert shares.nbytes == 1180, "until it is gone"


def test_who_has_nothing_that_may_go_is_passed_over() -> None:
    shares = shares_of("tenant=a 10%", "tenant=b 50%")
    names = fill(shares, "a", 500)
    fill(shares, "b", 10)
    assert all(shares.set_aside(name) for name in names)
    assert not shares.set_aside(names[0])
    victims = [shares.choose(), shares.choose()]
    assert [victim and owner(victim.name)[0] for victim in victims] == ["b", None]


def test_a_name_of_no_known_scope_is_refused() -> None:
    with pytest.raises(KeyError):
        shares_of().insert(bytes(64), 1, 1.0)


QUOTAS = st.lists(
    st.builds(
        lambda one, amount: f"{one} {amount}",
        st.sampled_from(["tenant=a", "tenant=b", "model=m"]),
        st.sampled_from(["10%", "30%", "200B", "700B"]),
    ),
    unique_by=lambda text: text.split()[0],
)
ENTRIES = st.lists(st.tuples(st.sampled_from(TENANTS), st.sampled_from(MODELS), st.integers(1, 100)), max_size=40)


def over(quotas: list[str], room: float, held: dict[bytes, int], name: bytes) -> float:
    """How much those to whom an entry belongs have of what they are sure of, as docs say it."""
    rules = [quota_of(text) for text in quotas]
    ratios = []
    for field, value in (("tenant", owner(name)[0]), ("model", owner(name)[1])):
        sure = {rule.value: rule.of(1000) for rule in rules if rule.field == field}
        if not sure:
            continue
        total = sum(sure.values())
        scaled = {one: nbytes * min(1.0, room / total) for one, nbytes in sure.items()}
        mine = scaled.get(value, max(1.0, room - sum(scaled.values())))
        alike = {value} if value in sure else {*TENANTS, *MODELS} - set(sure)
        place = ("tenant", "model").index(field)
        ratios.append(sum(nbytes for one, nbytes in held.items() if owner(one)[place] in alike) / mine)
    return min(ratios, default=0.0)


@settings(max_examples=30)
@given(QUOTAS, ENTRIES, st.sampled_from([900.0, 500.0]), st.data())
def test_victims_are_always_of_whom_is_furthest_above(
    quotas: list[str], entries: list[tuple[str, str, int]], room: float, data: st.DataObject
) -> None:
    shares = shares_of(*quotas, room=room)
    held: dict[bytes, int] = {}
    for tenant, model, nbytes in entries:
        name = named(tenant, model)
        shares.insert(name, nbytes, 1.0)
        held[name] = nbytes
        if data.draw(st.booleans()):
            shares.resize(1000, room)
    aside: list[bytes] = []
    while (victim := shares.choose()) is not None:
        most = max(over(quotas, room, held, name) for name in held)
        assert over(quotas, room, held, victim.name) >= most * (1 - 1e-9)
        shares.leaving(victim.name, held.pop(victim.name))
        aside.append(victim.name)
    assert len(aside) == len(entries)
    assert shares.nbytes == sum(nbytes for _, _, nbytes in entries)
    for name in aside:
        shares.remove(name)
    assert shares.nbytes == 0
