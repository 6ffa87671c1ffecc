"""Play one schedule again, with what happened in it: `python -m tests.simulation.replay SEED --verbose`."""

from __future__ import annotations

import argparse
import sys

from .bugs import BUGS, planted
from .checker import Violation
from .world import World


def main() -> int:
    """The exit status is 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument(
        "--verbose", action="store_true", help="all that happens, with the time of the world in seconds"
    )
    parser.add_argument("--bug", default="", choices=["", *BUGS], help="a deliberate one, in the code")
    parser.add_argument("--last", type=int, default=0, metavar="LINES", help="only the end of it")
    arguments = parser.parse_args()
    world = World(arguments.seed, verbose=arguments.verbose)
    failure = ""
    try:
        with planted(arguments.bug):
            world.run()
    except Violation as violation:
        failure = str(violation)
    for line in world.trace[-arguments.last :]:
        print(line)
    for what, count in sorted(world.counts.items()):
        print(f"{count:6} {what}", file=sys.stderr)
    print(f"seed {arguments.seed}: {failure or 'all holds'} ({world.events.count} events)", file=sys.stderr)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
