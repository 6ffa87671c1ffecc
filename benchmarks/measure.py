"""Paired measurements: all contenders take turns, so that a machine that speeds up or slows down does so for all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

Contender = Callable[[], object]


def paired(contenders: Mapping[str, Contender], *, runs: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each run of each contender: A B C, A B C, …; what a run returns is dropped after it is timed."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()
    try:
        for run in range(warm_up + runs):
            for name, contender in contenders.items():
                started = time.perf_counter()
                kept = contender()
                elapsed = time.perf_counter() - started
                del kept
                if run >= warm_up:
                    seconds[name].append(elapsed)
    finally:
        gc.enable()
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each contender's runs, in seconds."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def ratio(seconds: Mapping[str, list[float]], contender: str, baseline: str) -> float:
    """Median over the pairs of (baseline's seconds / contender's): 1 is as fast, less is slower."""
    pairs = zip(seconds[baseline], seconds[contender], strict=True)
    return statistics.median(base / ours for base, ours in pairs)
