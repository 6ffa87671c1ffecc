"""Contenders take turns, warm-up runs do not count, and a ratio is the median over pairs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.measure import medians, paired, ratio


def test_contenders_take_turns_and_warm_up_runs_do_not_count() -> None:
    turns: list[str] = []
    seconds = paired({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, runs=3, warm_up=2)
    assert turns == ["a", "b"] * 5
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_a_ratio_is_of_pairs_so_a_slow_moment_of_both_does_not_count() -> None:
    seconds = {"raw": [1.0, 10.0, 1.0], "ours": [2.0, 20.0, 2.0]}
    assert ratio(seconds, "ours", "raw") == 0.5
    assert medians(seconds) == {"raw": 1.0, "ours": 2.0}
