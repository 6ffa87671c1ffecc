"""What a policy with a million entries costs: CPU time of each call, and memory.

A process of its own for each policy, so that its memory is its own: `python -m benchmarks.policy_speed s3cost`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import psutil

from mmcache.controller.eviction import POLICIES, PolicyName

ENTRIES: Final = 1_000_000
ACCESSES: Final = 500_000
STEPS: Final = 20
"""In so many the entries are replaced by others; the median counts."""


def measure(name: PolicyName, entries: int) -> dict[str, float]:
    """Microseconds of CPU time a call, and bytes an entry, once as many entries have gone as there are."""
    chance = random.Random(1)
    names = [chance.randbytes(64) for _ in range(2 * entries)]
    sizes = [chance.randrange(100_000, 20_000_000) for _ in range(1024)]
    accessed = [names[chance.randrange(entries)] for _ in range(min(ACCESSES, entries))]
    policy = POLICIES[name]()
    gc.collect()
    before = psutil.Process().memory_info().rss

    def insert(numbers: Iterable[int]) -> None:
        for number in numbers:
            policy.insert(names[number], sizes[number % 1024], sizes[-number % 1024] / 1e5)

    def access(names: Iterable[bytes]) -> None:
        for each in names:
            policy.access(each, 2)

    def choose(numbers: Iterable[int]) -> None:
        for _ in numbers:
            victim = policy.choose()
            if victim is not None:
                victims.append(victim)

    def remove(names: Iterable[bytes]) -> None:
        for each in names:
            policy.remove(each)

    def timed(call: Callable[..., None], argument: Sequence[int] | Sequence[bytes]) -> float:
        began = time.process_time()
        call(argument)
        return (time.process_time() - began) / len(argument) * 1e6

    calls = {"insert": [timed(insert, range(entries))], "access": [timed(access, accessed)], "choose": [], "remove": []}
    victims: list[bytes] = []
    for step in range(STEPS):
        numbers = range(entries + step * entries // STEPS, entries + (step + 1) * entries // STEPS)
        calls["choose"].append(timed(choose, numbers))
        calls["remove"].append(timed(remove, victims))
        calls["insert"].append(timed(insert, numbers))
        victims.clear()
    memory = psutil.Process().memory_info().rss - before
    figures = {f"{call}_us": statistics.median(rounds) for call, rounds in calls.items()}
    return {**figures, "bytes_an_entry": memory / entries}


def in_a_process(name: PolicyName, entries: int) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.policy_speed", name, "--entries", str(entries)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    """Run it, and print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy_speed", description=__doc__)
    parser.add_argument("policy", choices=list(POLICIES))
    parser.add_argument("--entries", type=int, default=ENTRIES, help="(default: a million)")
    given = parser.parse_args()
    print(json.dumps(measure(given.policy, given.entries)))


if __name__ == "__main__":
    main()
