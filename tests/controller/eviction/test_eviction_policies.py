"""All policies keep one contract: what is there is chosen once, what is aside never, and sums are right."""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import random
from collections.abc import Iterator
from unittest import mock

import pytest

from mmcache.controller.eviction import DEFAULT, POLICIES, Policy, S3Cost
from mmcache.controller.eviction.policy import MOST_PASSED_OVER
from mmcache.controller.eviction.queues import Queues

KIB = 1024


def name(number: int) -> bytes:
    return hashlib.sha512(number.to_bytes(8, "big")).digest()


def victims(policy: Policy) -> Iterator[bytes]:
    """What goes, until nothing is left to choose."""
    while (victim := policy.choose()) is not None:
        policy.remove(victim)
        yield victim


@pytest.fixture(params=list(POLICIES))
def policy(request: pytest.FixtureRequest) -> Policy:
    return made(request.param)


def made(kind: str) -> Policy:
    """A policy that is empty, and has been asked for a victim before."""
    policy = POLICIES[kind]()  # type: ignore[index]
    policy.insert(name(10**9), 1, 1.0)
    assert list(victims(policy)) == [name(10**9)]
    return policy


def fill(policy: Policy, count: int, *, nbytes: int = KIB, cost_ms: float = 1.0) -> list[bytes]:
    names = [name(number) for number in range(count)]
    for each in names:
        policy.insert(each, nbytes, cost_ms)
    return names


def test_the_default_is_one_of_them() -> None:
    assert DEFAULT in POLICIES


def test_nothing_is_chosen_from_nothing(policy: Policy) -> None:
    assert policy.choose() is None
    assert (len(policy), policy.nbytes) == (0, 0)


def test_everything_is_chosen_once(policy: Policy) -> None:
    names = fill(policy, 100)
    for number, each in enumerate(names):
        policy.access(each, number % 7)
    assert (len(policy), policy.nbytes) == (100, 100 * KIB)
    chosen = list(itertools.islice(iter(policy.choose, None), 200))
    assert sorted(chosen) == sorted(names)
    assert (len(policy), policy.nbytes) == (100, 100 * KIB), "they are aside, not gone"
    assert all(policy.remove(each) for each in chosen)
    assert (len(policy), policy.nbytes) == (0, 0)


def test_what_is_never_used_goes_in_order_of_arrival(policy: Policy) -> None:
    names = fill(policy, 50)
    assert list(victims(policy)) == names


def test_what_is_used_outlives_what_is_not(policy: Policy) -> None:
    """Ten of the first are used between many that are not."""
    used = {name(number) for number in range(10)}
    fill(policy, 10)
    room = 100 * KIB
    for number in range(10, 2000):
        while policy.nbytes + KIB > room:
            victim = policy.choose()
            assert victim is not None
            assert victim not in used
            policy.remove(victim)
        policy.insert(name(number), KIB, 1.0)
        policy.access(name(number % 10))


def test_a_batch_of_hits_counts_as_many_single_ones(policy: Policy) -> None:
    other = made(next(kind for kind, each in POLICIES.items() if isinstance(policy, each)))  # type: ignore[arg-type]
    for each in (policy, other):
        fill(each, 40)
    for number in range(0, 40, 3):
        policy.access(name(number), number % 5)
        for _ in range(number % 5):
            other.access(name(number))
    assert list(victims(policy)) == list(victims(other))


def test_what_is_aside_is_never_chosen_and_still_counts(policy: Policy) -> None:
    names = fill(policy, 30)
    pinned = names[::3]
    assert all(policy.set_aside(each) for each in pinned)
    assert not any(policy.set_aside(each) for each in pinned), "it is aside already"
    for each in pinned:
        policy.access(each, 2)
    assert all(policy.is_aside(each) for each in pinned)
    assert (len(policy), policy.nbytes) == (30, 30 * KIB)
    assert not set(victims(policy)) & set(pinned)
    assert (len(policy), policy.nbytes) == (10, 10 * KIB)
    assert all(policy.put_back(each) for each in pinned)
    assert not any(policy.put_back(each) for each in pinned), "none is aside any more"
    assert sorted(victims(policy)) == sorted(pinned)


def test_a_victim_that_is_put_back_comes_later_than_its_like(policy: Policy) -> None:
    names = fill(policy, 20)
    leased = policy.choose()
    assert leased == names[0]
    assert policy.put_back(leased)
    assert list(victims(policy)) == [*names[1:], leased]


def test_everything_pinned_costs_no_search(policy: Policy) -> None:
    for each in fill(policy, 100):
        policy.set_aside(each)
    assert policy.choose() is None
    policy.insert(name(1000), KIB, 1.0)
    assert policy.choose() == name(1000)


def test_names_that_are_not_there_are_left_alone(policy: Policy) -> None:
    fill(policy, 3)
    policy.access(name(7), 5)
    assert not policy.remove(name(7))
    assert not policy.set_aside(name(7))
    assert not policy.put_back(name(7))
    assert not policy.is_aside(name(7))
    assert name(7) not in policy
    assert name(1) in policy
    assert (len(policy), policy.nbytes) == (3, 3 * KIB)


@pytest.mark.parametrize("aside", [False, True])
def test_publishing_what_is_there_changes_its_size(policy: Policy, aside: bool) -> None:
    names = fill(policy, 3)
    if aside:
        policy.set_aside(names[1])
    policy.insert(names[1], 10 * KIB, 2.0)
    assert (len(policy), policy.nbytes) == (3, 12 * KIB)
    assert policy.is_aside(names[1]) == aside
    policy.put_back(names[1])
    assert sorted(victims(policy)) == sorted(names)
    assert policy.nbytes == 0


@pytest.mark.parametrize("nbytes", [0, -1, 2**48])
def test_a_size_that_cannot_be_is_refused(policy: Policy, nbytes: int) -> None:
    with pytest.raises(ValueError, match="nbytes cannot be"):
        policy.insert(name(1), nbytes, 1.0)
    assert len(policy) == 0


def test_a_name_of_another_length_is_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match="name has 3 bytes, not 64"):
        policy.insert(b"abc", 1, 1.0)
    assert len(policy) == 0


@pytest.mark.parametrize("count", [0, -3])
def test_no_hits_are_no_use(policy: Policy, count: int) -> None:
    names = fill(policy, 3)
    policy.access(names[0], count)
    assert list(victims(policy)) == names


def test_sizes_of_all_kinds_add_up(policy: Policy) -> None:
    sizes = [1, 2**48 - 1, 7 * KIB, 2**40, 1, 3]
    for number, nbytes in enumerate(sizes):
        policy.insert(name(number), nbytes, 1.0)
    assert policy.nbytes == sum(sizes)
    assert len(list(victims(policy))) == len(sizes)
    assert policy.nbytes == 0


def test_a_place_is_used_again(policy: Policy) -> None:
    """Memory follows how many there are, not how many there were."""
    for number in range(5000):
        policy.insert(name(number), KIB, 1.0)
        if len(policy) > 10:
            victim = policy.choose()
            assert victim is not None
            policy.remove(victim)
    assert len(policy._queues.queue) < 40


def test_a_choice_passes_over_a_bounded_number(policy: Policy) -> None:
    """All are in use: a choice takes some victim, and goes past no more than it may."""
    for each in fill(policy, 20 * MOST_PASSED_OVER):
        policy.access(each, 10)
    with mock.patch.object(Queues, "move", autospec=True, side_effect=Queues.move) as moves:
        for _ in range(50):
            moves.reset_mock()
            assert policy.choose() is not None
            assert moves.call_count <= MOST_PASSED_OVER


def test_the_garbage_collector_has_nothing_to_walk(policy: Policy) -> None:
    gc.collect()
    before = len(gc.get_objects())
    fill(policy, 5000)
    for _ in range(2500):
        victim = policy.choose()
        assert victim is not None
        policy.remove(victim)
    assert len(gc.get_objects()) - before < 500


LIES = [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e12, 5e-324, 1.7e308]


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_costs_does_no_lasting_harm(policy: Policy, lie: float) -> None:
    """Whoever lies of entries that nobody uses does not displace honest ones that are used, at first or later."""
    room = 200 * KIB
    liars = itertools.count(10_000)
    hits = asked = 0
    for step in range(6000):
        number = next(liars) if step % 2 else (step // 2 * 7919) % 60
        if name(number) in policy:
            policy.access(name(number))
            hits += 1
        else:
            while policy.nbytes + KIB > room:
                victim = policy.choose()
                assert victim is not None
                policy.remove(victim)
            policy.insert(name(number), KIB, lie if step % 2 else 100.0)
        asked += not step % 2
    assert hits > 0.95 * asked


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_whose_entries_were_used_gives_way(lie: float) -> None:
    """What was used often, and cost much as they say, goes after a bounded time without use."""
    policy = S3Cost()
    room = 200 * KIB
    for number in range(1000):
        policy.insert(name(number), KIB, 100.0)
        policy.remove(name(number))
    liars = [name(100_000 + number) for number in range(150)]
    for each in liars:
        policy.insert(each, KIB, lie)
        policy.access(each, 10**9)
    chance = random.Random(1)
    for _ in range(8000):
        number = chance.randrange(300)
        if name(number) in policy:
            policy.access(name(number))
        else:
            while policy.nbytes + KIB > room:
                victim = policy.choose()
                assert victim is not None
                policy.remove(victim)
            policy.insert(name(number), KIB, 100.0)
    assert sum(each in policy for each in liars) == 0


def test_the_dearer_entry_stays() -> None:
    policy = S3Cost()
    for number in range(100):
        policy.insert(name(number), KIB, 8.0 if number % 2 else 1.0)
        policy.access(name(number))
    gone = list(itertools.islice(victims(policy), 40))
    assert {name(number) for number in range(0, 100, 2)} >= set(gone)


def test_a_cost_of_more_than_an_hour_is_an_hour() -> None:
    """Whoever comes first says what is usual; a lie does not make all others look alike."""
    policy = S3Cost()
    policy.insert(name(1000), KIB, 1e12)
    for number in range(100):
        policy.insert(name(number), KIB, 3.6e6 if number % 2 else 4e5)
        policy.access(name(number))
    gone = list(itertools.islice(victims(policy), 41))
    assert {name(number) for number in [*range(0, 100, 2), 1000]} >= set(gone)


@pytest.mark.parametrize("cost_ms", [math.nan, math.inf, -math.inf, -1.0, 0.0])
def test_a_cost_that_cannot_be_counts_as_usual(cost_ms: float) -> None:
    """Neither cheap nor dear: it goes after what is cheaper, and before what is dearer."""
    policy = S3Cost()
    for number in range(150):
        policy.insert(name(number), KIB, (1.0, cost_ms, 256.0)[number % 3] if number >= 60 else 16.0)
        policy.access(name(number))
    gone = list(victims(policy))
    cheap, unknown, dear = ([gone.index(name(60 + 3 * number + kind)) for number in range(20)] for kind in range(3))
    assert max(cheap) < min(unknown)
    assert max(unknown) < min(dear)


def test_the_smaller_entry_stays() -> None:
    policy = S3Cost()
    for number in range(100):
        policy.insert(name(number), KIB if number % 2 else 8 * KIB, 1.0)
        policy.access(name(number))
    gone = list(itertools.islice(victims(policy), 40))
    assert {name(number) for number in range(0, 100, 2)} >= set(gone)


@pytest.mark.parametrize("kind", ["s3fifo", "s3cost"])
def test_who_comes_back_soon_is_not_new(kind: str) -> None:
    """A ghost is inserted again, and outlives what is new."""
    policy = made(kind)
    names = fill(policy, 100)
    for _ in range(20):
        victim = policy.choose()
        assert victim is not None
        policy.remove(victim)
    policy.insert(names[5], KIB, 1.0)
    for number in range(200, 215):
        policy.insert(name(number), KIB, 1.0)
    gone = list(itertools.islice(victims(policy), 85))
    assert names[5] not in gone


@pytest.mark.parametrize(("kind", "most"), [("s3fifo", 1), ("s3cost", 2)])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 1 << 30), (1 << 30, 1)])
def test_ghosts_are_bounded(kind: str, most: int, sizes: tuple[int, int]) -> None:
    """By what is there, in names and in bytes, whatever sizes come after whatever others."""
    policy = POLICIES[kind]()  # type: ignore[index]
    for number in range(3000):
        policy.insert(name(number), sizes[number >= 1500], 1.0)
        while len(policy) > 100:
            victim = policy.choose()
            assert victim is not None
            policy.remove(victim)
        assert policy.ghosts <= most * len(policy)  # type: ignore[attr-defined]
        assert policy._ghosts.nbytes <= most * policy.nbytes  # type: ignore[attr-defined]
    assert len(policy._ghosts._left) < 3000  # type: ignore[attr-defined]
    list(victims(policy))
    assert policy.ghosts == 0  # type: ignore[attr-defined]
