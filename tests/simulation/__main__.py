"""Play schedules until one fails: `python -m tests.simulation --jobs 2`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .schedules import play_all, replay


def main() -> int:
    """The exit status is 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, help="how many; without end by default")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--every", type=float, default=30.0, metavar="SECONDS", help="between two reports")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    schedules = events = 0
    began = told = time.monotonic()
    failure = ""
    try:
        for played in play_all(arguments.first, arguments.schedules, jobs=arguments.jobs):
            schedules += played.schedules
            events += played.events
            counts.update(played.counts)
            if played.seed is not None:
                failure = f"seed {played.seed}: {played.failure}\n{replay(played.seed)}"
            if time.monotonic() - told >= arguments.every:
                told = time.monotonic()
                print(f"{schedules} schedules, {schedules / (told - began):.0f} a second", flush=True)
    except KeyboardInterrupt:
        pass
    seconds = time.monotonic() - began
    for what, count in sorted(counts.items()):
        print(f"{count:10} {what}")
    print(f"{schedules} schedules with {events} events in {seconds:.0f} s, {schedules / seconds:.0f} a second")
    print(failure or "all holds")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
