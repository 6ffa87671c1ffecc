"""A store that is much too small, while what it stands on breaks: a short run of `benchmarks.capacity`.

Nothing here judges how fast this machine is: how soon must be within a minute, and how much is the benchmark's to say.
"""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from benchmarks.capacity import Options, run

SHORT = Options(
    segment=32 << 20, footprint=96 << 20, seconds=6.0, rate=60.0, ranks=200, steady_seconds=5.0, race_seconds=6.0
)


@pytest.mark.timeout(400)
def test_a_directory_over_a_small_store_is_right_again_whatever_breaks() -> None:
    load = run(["load"], SHORT, Console(stderr=True))["load"]
    assert load["errors"] == []
    assert load["wrong"] == []
    assert load["controller"]["evicted.watermark"] > 0
    assert math.isfinite(load["controller_right_s"])
    assert load["removed_behind"] > 0
    assert math.isfinite(load["noticed_s"])
    assert math.isfinite(load["master_empty_s"])
    assert load["served_from_before"] == []
    assert math.isfinite(load["right_at_last_s"])


@pytest.mark.timeout(400)
def test_publications_and_removals_of_one_key_leave_nothing_that_cannot_be_read() -> None:
    race = run(["race"], SHORT, Console(stderr=True))["race"]
    assert race["removed"] > 0
    assert race["false"] == []
    assert race["unreadable"] == []
    assert race["wronged"] == []
    assert race["failures"] == 0
