"""Guesses at an object's size: from its name, else from its scope, in tables that do not grow without end."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from serving import Serving, key_of

from mmcache.client.local import ExpectedSizes
from mmcache.key import EmbeddingKey

DEFAULT = 1 << 20


def scope(number: int) -> EmbeddingKey:
    """A key of that scope."""
    return key_of(0, version=str(number))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_a_scopes_guess_is_the_second_largest_of_its_last_sixteen(sizes: list[int]) -> None:
    expected = ExpectedSizes(default_bytes=DEFAULT)
    for number, nbytes in enumerate(sizes):
        expected.learn(f"name-{number}", scope(0), nbytes)
    last = sorted(sizes[-16:], reverse=True)
    assert expected.guess("another", scope(0)) == (last[1] if len(last) > 1 else last[0])
    assert expected.guess("another", scope(1)) == DEFAULT
    for number, nbytes in enumerate(sizes):
        assert expected.guess(f"name-{number}", scope(0)) == nbytes, "a name that is known has its own"


def test_names_and_scopes_are_bounded_and_the_oldest_are_forgotten() -> None:
    expected = ExpectedSizes(default_bytes=DEFAULT, max_names=3, max_scopes=2)
    for number in range(100):
        expected.learn(f"name-{number}", scope(number), number + 1)
        expected.learn("used", scope(-1), 5)
    assert len(expected._names) == 3
    assert len(expected._scopes) == 2
    unknown = scope(1000)
    assert [expected.guess(f"name-{number}", unknown) for number in (97, 98, 99)] == [DEFAULT, 99, 100]
    assert expected.guess("used", unknown) == 5
    assert [expected.guess("another", scope(number)) for number in (98, 99, -1)] == [DEFAULT, 100, 5]


def test_guesses_take_at_most_a_quarter_of_the_pool(serving: Serving) -> None:
    writer = serving.connect()
    large = [key_of(f"guess-large-{number}", version="guess") for number in range(2)]
    small = [key_of(f"guess-small-{number}", version="guess") for number in range(8)]
    for key in large:
        assert writer.put(key, torch.ones(3 << 18)).readable
    for key in small:
        assert writer.put(key, torch.ones(10)).readable
    reader = serving.connect(pool_bytes="8MiB", local_entries=False)
    assert all(reader.get(key) is not None for key in large)
    store, pool = reader._attacher.require()
    read_into, taken = store.read_into, []

    def watched_read_into(names, addresses, sizes, **named):
        taken.append((sum(sizes), pool.stats()["used"]))
        return read_into(names, addresses, sizes, **named)

    store.read_into = watched_read_into
    assert reader.get(small[0]) is not None, "3 MiB were guessed"
    assert all(reader.get_many(small[1:]))
    assert taken
    assert all(asked <= used and asked <= pool.capacity // 4 for asked, used in taken)
