"""What holds of every engine, whatever is broken below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.fault_engine import Engine
from benchmarks.fault_load import Options

SLACK_SECONDS = 5.0
"""For a machine that is busy with other tests, and for Mooncake, which can keep all Python of a process waiting so long
while it attaches to what is dying. What is looked for are calls that wait as long as it does: 30 s."""
BACK_SECONDS = 60.0
"""By then calls succeed again, on any machine."""
CLOSE_SECONDS = 20.0
FEW = {"threads": 8, "system_threads": 8, "descriptors": 32}
"""I/O threads, and the store's connections, which are made when they are first needed: a few for each process of it."""
LEFT_BY_AN_ATTACHMENT = 4
"""Threads and descriptors of a store client that could not be closed, since bytes may still be under way to it."""


def unharmed(said: dict[str, Any], options: Options) -> None:
    """No exception in a caller, no wrong byte, no call that outlasted its deadline."""
    assert said["exceptions"] == []
    assert said["wrong"] == []
    # get_or_compute reads, waits for whoever computes the same, and publishes: the timeout for each.
    bounds = {"get": options.timeout, "put": options.timeout, "compute": 3 * options.timeout}
    late = {kind: seconds for kind, seconds in said["longest"].items() if seconds > bounds[kind] + SLACK_SECONDS}
    assert not late, f"calls outlasted their deadlines: {late}"


def serve_again(engines: Iterable[Engine], options: Options) -> None:
    """All calls of all engines succeed again, and none was harmed meanwhile."""
    engines = list(engines)
    for engine in engines:
        engine.tell("watch", seconds=BACK_SECONDS)
    for engine in engines:
        said = engine.hear(BACK_SECONDS + 30.0)
        unharmed(said, options)
        assert said["back"], f"calls still fail after {BACK_SECONDS} s: {said['stats']}\n{engine.log}"


def hold_nothing(engines: Iterable[Engine]) -> list[dict[str, float]]:
    """What each engine holds once none of its calls runs: no block, for one."""
    engines = list(engines)
    for engine in engines:
        engine.tell("rest")
    holds = [engine.hear(120.0)["holds"] for engine in engines]
    assert [held["held_blocks"] for held in holds] == [0] * len(holds)
    return holds


def no_more_than(before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]) -> None:
    """Engines have no more threads and open files than before."""
    for earlier, now in zip(before, after, strict=True):
        attachments = now["attachments_lost"] - earlier["attachments_lost"]
        for what, few in FEW.items():
            assert now[what] <= earlier[what] + few + LEFT_BY_AN_ATTACHMENT * attachments, f"{earlier} became {now}"
