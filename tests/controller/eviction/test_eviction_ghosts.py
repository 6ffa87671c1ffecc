"""Ghosts are a plain queue of names, in less room: what left last is known, and nothing else."""

from __future__ import annotations

import hypothesis.strategies as st
import xxhash
from hypothesis import given

from mmcache.controller.eviction.ghosts import Ghosts


def names_that_are_close() -> list[bytes]:
    """Of which several begin with the same 16 bits when they are hashed, so that they are kept together."""
    names: dict[bytes, list[bytes]] = {}
    for number in range(100_000):
        name = number.to_bytes(64, "big")
        names.setdefault(xxhash.xxh3_64_digest(name)[:2], []).append(name)
    closest = sorted(names.values(), key=len)[-3:]
    return [name for alike in closest for name in alike]


NAMES = names_that_are_close()
STEPS = st.one_of(
    st.tuples(st.just("come"), st.sampled_from(NAMES), st.integers(1, 5)),
    st.tuples(st.just("trim"), st.integers(0, 40), st.integers(0, 16)),
)


@given(st.lists(STEPS, max_size=120))
def test_they_are_a_queue_in_which_one_can_look(steps: list[tuple[str, bytes | int, int]]) -> None:
    """Every name comes, is asked for and leaves again, as it does in a policy."""
    ghosts = Ghosts()
    model: list[tuple[bytes | None, int]] = []
    for step, what, number in steps:
        if isinstance(what, bytes):
            place = next((place for place, (name, _) in enumerate(model) if name == what), None)
            assert ghosts.take(what) == (place is not None)
            if place is not None:
                model[place] = (None, model[place][1])
                assert not ghosts.take(what), "it is forgotten"
            ghosts.add(what, number)
            model.append((what, number))
        else:
            ghosts.trim(what, number)
            while model and (len(model) > number or sum(nbytes for _, nbytes in model) > what):
                model.pop(0)
        assert (len(ghosts), ghosts.nbytes) == (len(model), sum(nbytes for _, nbytes in model)), step
    for name in NAMES:
        assert ghosts.take(name) == any(name == ghost for ghost, _ in model)


def test_what_comes_back_is_not_forgotten_with_what_left_before() -> None:
    """A name left, came back and left again: it is known for as long as what left when it did so last."""
    ghosts = Ghosts()
    again, other = NAMES[:2]
    ghosts.add(again, 1)
    assert ghosts.take(again)
    ghosts.add(other, 1)
    ghosts.add(again, 1)
    ghosts.trim(10, 2)
    assert ghosts.take(again)
    assert ghosts.take(other)


def test_memory_is_that_of_what_is_remembered() -> None:
    ghosts = Ghosts()
    for number in range(50_000):
        ghosts.add(number.to_bytes(64, "big"), 1)
        ghosts.trim(1 << 40, 100)
    assert len(ghosts) == 100
    assert len(ghosts._shelves) <= 100
    assert sum(map(len, ghosts._shelves.values())) == 100 * 8
    assert len(ghosts._left) == len(ghosts._sizes) < 3000
