"""What benchmarks.faults reports of a call's samples, and which bars it says were missed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.fault_load import Sample
from benchmarks.faults import figures_of, missed

BEFORE = [Sample(number / 10, 0.001, True) for number in range(10)]


def test_the_outage_is_what_follows_the_first_failure_until_the_mending() -> None:
    outage = [Sample(1.0, 0.5, False), *(Sample(1.5 + number, 50e-6, False) for number in range(3))]
    after = [Sample(5.0, 0.001, False), Sample(5.5, 0.25, True)]
    figures = figures_of([*BEFORE, *outage, *after], 1.0, broken=1.0, mending=4.9, returned=5.0)
    assert figures["before_median_us"] == pytest.approx(1000)
    assert figures["first_failure_ms"] == 500
    assert (figures["outage_calls"], figures["outage_failed"]) == (3, 3)
    assert figures["outage_median_us"] == pytest.approx(50)
    assert figures["over_bound_ms"] == -500
    assert figures["back_s"] == pytest.approx(0.75)
    assert missed(figures, back_bar=3.0) == []
    assert missed(figures, back_bar=0.5) == ["back"]


def test_a_fault_that_no_call_noticed_misses_no_bar() -> None:
    figures = figures_of([*BEFORE, Sample(2.0, 0.001, True)], 1.0, broken=1.0, mending=1.5, returned=1.6)
    assert figures["first_failure_ms"] is figures["outage_median_us"] is None
    assert (figures["back_s"], missed(figures, back_bar=3.0)) == (0.0, [])


def test_late_slow_and_lost_calls_miss_their_bars() -> None:
    outage = [Sample(1.0, 1.2, False), *(Sample(2.2 + number, 0.001, False) for number in range(3))]
    figures = figures_of([*BEFORE, *outage, Sample(6.0, 0.001, False)], 1.0, broken=1.0, mending=5.0, returned=5.5)
    assert figures["back_s"] is None
    assert missed(figures, back_bar=3.0) == ["deadline", "median", "back"]
