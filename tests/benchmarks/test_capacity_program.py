"""What the capacity benchmark says of requests is right, and it sees an embedding that is another's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.capacity import Options, bars
from benchmarks.capacity_load import (
    FOUND,
    Request,
    embedding_of,
    hit_ratio,
    is_of,
    served_from_before,
    simulated,
)
from mmcache.store.allocation import allocated

NBYTES = 4096 + 400


def test_items_have_the_bytes_that_were_asked_for() -> None:
    load = Options(footprint=64 << 20, seconds=20.0).load(more_seconds=10.0)
    trace = load.trace
    items = np.unique(trace.requests[: round(load.rate * 20.0)])
    assert trace.nbytes[items].sum() == pytest.approx(64 << 20, rel=0.01)
    assert len(trace.requests) == load.rate * 30.0


def test_an_embedding_of_another_item_is_seen() -> None:
    assert is_of(embedding_of(7, NBYTES), 7, NBYTES)
    assert embedding_of(7, NBYTES).numel() * 4 + 4096 == NBYTES
    torn = embedding_of(7, NBYTES)
    torn[-1] = 8
    assert not is_of(torn, 7, NBYTES)
    assert not is_of(embedding_of(8, NBYTES), 7, NBYTES)
    assert not is_of(embedding_of(7, NBYTES)[:-1], 7, NBYTES)
    assert not is_of(embedding_of(7, NBYTES).to(torch.float32), 7, NBYTES)


@pytest.mark.parametrize(
    ("requests", "served"),
    [
        ([Request(0, 1, 5, 3.0), Request(2, 3, 5, FOUND)], [5]),
        ([Request(0, 1, 5, 3.0), Request(1, 3, 5, FOUND)], []),  # it may have read before the time in question
        ([Request(0, 1, 5, 3.0), Request(2, 3, 5, 3.0), Request(3, 4, 5, FOUND)], []),
        ([Request(1, 3, 5, 3.0), Request(2, 2.5, 5, FOUND)], []),  # of a publication that was under way
        ([Request(3, 4, 5, 3.0), Request(2, 2.5, 5, FOUND)], [5]),
    ],
)
def test_what_was_served_though_nobody_had_computed_it_since_is_told(
    requests: list[Request], served: list[int]
) -> None:
    assert served_from_before(requests, 1.5) == served


def test_requests_are_replayed_in_the_order_in_which_they_were_answered() -> None:
    load = Options(footprint=8 << 20, seconds=5.0, ranks=20).load()
    sizes = [allocated(one) for one in load.trace.nbytes.tolist()]
    room = sizes[0] + sizes[1]
    late_first = [Request(0, 9, 0, 1.0), Request(0, 1, 0, FOUND), Request(1, 2, 1, 1.0)]
    assert simulated(load, late_first, "lru", room) == pytest.approx(1 / 3)
    assert hit_ratio(late_first) == pytest.approx(1 / 3)
    again = [Request(number, number, number % 2, 1.0) for number in range(10)]
    assert simulated(load, again, "lru", room) == pytest.approx(0.8)
    assert simulated(load, again, "lru", room - 1) == 0.0


def test_each_bar_can_be_missed() -> None:
    good = {
        "load": {
            "most_used": 0.9,
            "least_used": 0.85,
            "hit_ratio": 0.3,
            "simulated_hit_ratio": 0.31,
            "wrong": [],
            "errors": [],
            "controller_right_s": 3.0,
            "noticed_s": 3.0,
            "master_empty_s": 3.0,
            "served_from_before": [],
        },
        "steady": {"puts": {"stored": 1000, "no_space": 5}},
        "race": {"removed": 30, "false": [], "unreadable": [], "wronged": [], "failures": 0},
    }
    assert all(row["met"] for row in bars(good))
    for part, name, bad in (
        ("load", "most_used", 0.99),
        ("load", "least_used", 0.5),
        ("load", "hit_ratio", 0.27),
        ("load", "wrong", ["one"]),
        ("load", "errors", ["one"]),
        ("load", "controller_right_s", 11.0),
        ("load", "noticed_s", float("inf")),
        ("load", "master_empty_s", 11.0),
        ("load", "served_from_before", [1]),
        ("steady", "puts", {"stored": 900, "no_space": 100}),
        ("race", "removed", 0),
        ("race", "false", ["one"]),
        ("race", "unreadable", ["one"]),
        ("race", "wronged", ["one"]),
        ("race", "failures", 1),
    ):
        one = {**good, part: {**good[part], name: bad}}  # type: ignore[dict-item]
        assert sum(not row["met"] for row in bars(one)) == 1, name
