"""Whether a store that is much too small stays within its watermarks, and the directory tells the truth about it.

Four processes ask for eight times what the store holds, with `get_or_compute`; each embedding names its key, and is
looked at. Twice a second the controller and the store's master are asked how much is used: the controller counts what
objects take of their segment, which is up to an eighth more than the bytes that the master counts, and what is said to
be used is the controller's figure. What hits is compared with a simulation of the same policy, given the same requests
in the order in which they were answered, in as much room as was used on average. Then, under the same load, the
controller is killed, objects are removed behind its back, and the store's master is killed.

The other parts have clusters of their own: publishing 1.2 times the capacity a minute, and a race of publications with
removals on one key.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from rich.console import Console
from rich.table import Table

from benchmarks.capacity_load import (
    PROCESSES,
    Load,
    Request,
    ask,
    hit_ratio,
    publish,
    remove_behind,
    served_from_before,
    simulated,
)
from benchmarks.capacity_race import race
from benchmarks.capacity_watch import Outside, Sample, Watch, seconds_until
from benchmarks.crew import Worker, crew
from benchmarks.parts import Parts, free_ports
from benchmarks.policy_traces import KINDS, Kind
from mmcache.controller.eviction import DEFAULT, PolicyName
from mmcache.setting_kinds import parse_size

PARTS: Final = ("load", "steady", "race")
HIGH, LOW = 0.9, 0.85
SLACK: Final = 0.05
"""Of the capacity: what may be published until a removal is carried out."""
RECONCILE_S: Final = 5.0
REMOVED: Final = 50
TTL_S: Final = 2.0
COST_SCALE: Final = 0.1
"""Encode times, to those of the study."""
MORE_S: Final = 120.0
"""How long the load would go on, for the faults."""


class Options(NamedTuple):
    """What is measured."""

    policy: PolicyName = DEFAULT
    segment: int = 256 << 20
    footprint: int = 2 << 30
    seconds: float = 120.0
    steady_seconds: float = 60.0
    race_seconds: float = 20.0
    rate: float = 80.0
    ranks: int = 1500
    kind: Kind = "two models"
    lease_s: float = 1.0
    seed: int = 1

    def load(self, more_seconds: float = 0.0) -> Load:
        return Load(self.footprint, self.seconds, more_seconds, self.rate, self.ranks, self.kind, COST_SCALE, self.seed)


class Bench:
    """A cluster of one small segment, and what is seen of it from outside."""

    def __init__(self, options: Options, stack: contextlib.ExitStack, say: Console) -> None:
        self.options = options
        self._say = say
        admin = f"127.0.0.1:{free_ports(1)[0]}"
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mmcache-benchmark-"))
        controller = {
            "admin": admin,
            "state": f"{folder}/controller.db",
            "session_ttl": TTL_S,
            "reconcile_every": RECONCILE_S,
            "eviction": options.policy,
            "high_watermark": HIGH,
            "low_watermark": LOW,
        }
        self.parts = stack.enter_context(
            Parts(owner_bytes=0, sidecar_bytes=options.segment, controller=controller, store={"lease": options.lease_s})
        )
        self.outside = Outside(f"http://{admin}", self.parts.metrics)
        self.watch = stack.enter_context(Watch(self.outside))

    def say(self, text: str) -> None:
        self._say.print(text, highlight=False)

    @contextlib.contextmanager
    def workers(self, task: Any, load: Load) -> Iterator[list[Worker]]:
        """Processes of the load that are ready."""
        with crew(PROCESSES, task, str(self.parts.config), tuple(load)) as workers:
            for worker in workers:
                worker.hear()
            yield workers

    # The parts

    def under_load(self) -> dict[str, Any]:
        """Watermarks and hits under the load, and then what faults do."""
        options = self.options
        load = options.load(more_seconds=MORE_S)
        with self.workers(ask, load) as workers, crew(1, remove_behind, str(self.parts.config)) as (remover,):
            remover.hear()
            self.say(f"asking for {options.rate:g} embeddings a second, for {options.seconds:g} s")
            began = time.monotonic()
            for worker in workers:
                worker.tell(began=began)
            late_s = max(worker.hear()["late"] for worker in workers)
            ended = time.monotonic()
            counted = self.outside.figures()
            figures = self._faults(remover)
            for worker in workers:
                worker.tell(end=True)
            heard = [worker.hear() for worker in workers]
            remover.tell()
        requests = [Request(*one) for each in heard for one in each["requests"]]
        quiet = [one for one in requests if one.ended < ended]
        samples = self.watch.between(began, ended)
        puts = puts_of(each["counts"] for each in heard)
        return {
            **figures,
            "served_from_before": served_from_before(requests, figures["master_killed_at"]),
            "requests": len(quiet),
            "seconds": ended - began,
            "late_s": late_s,
            "controller": counted,
            "wrong": [one for each in heard for one in each["wrong"]],
            "errors": [one for each in heard for one in each["errors"]],
            "puts": puts,
            "hit_ratio": hit_ratio(quiet),
            **self._watermarks(samples, load, quiet),
        }

    def _watermarks(self, samples: Sequence[Sample], load: Load, requests: Sequence[Request]) -> dict[str, Any]:
        full = [sample for sample in samples if sample.used >= HIGH * sample.capacity]
        if not full:
            raise SystemExit("the store has never reached its high watermark")
        settled = [sample for sample in samples if sample.at >= full[0].at]
        kept = statistics.mean(sample.used for sample in settled)
        return {
            "samples": len(settled),
            "kept": kept / self.options.segment,
            "most_used": max(sample.used / sample.capacity for sample in settled),
            "least_used": min(sample.used / sample.capacity for sample in settled),
            "masters_most_used": max(sample.master_used / sample.capacity for sample in settled),
            "masters_mean_used": statistics.mean(sample.master_used / sample.capacity for sample in settled),
            "simulated_hit_ratio": simulated(load, requests, self.options.policy, kept),
        }

    def _faults(self, remover: Worker) -> dict[str, Any]:
        """Break what is below the directory, and see how soon it is right again."""
        parts, outside = self.parts, self.outside
        self.say("killing the controller")
        parts.controller.kill()
        killed_at = time.monotonic()
        parts.controller.start()
        began = time.monotonic()
        right_s = seconds_until(lambda: not outside.difference(), began)
        serves_s = began - killed_at
        self.say(f"it serves after {serves_s:.1f} s, the directory is right {right_s:.1f} s later; removing objects")
        time.sleep(2 * TTL_S)
        before = outside.entries()
        remover.tell(names=random.Random(self.options.seed).sample(sorted(before), min(REMOVED, len(before))))
        removed = remover.hear()["removed"]
        began = time.monotonic()
        entry_of = {name: before[name] for name in removed}
        noticed_s = seconds_until(lambda: not entry_of.items() & outside.entries().items(), began)
        self.say(f"{len(removed)} are noticed after {noticed_s:.1f} s; killing the master")
        before = outside.entries()
        parts.master.kill()
        killed_at = began = time.monotonic()
        parts.master.start()
        empty_s = seconds_until(lambda: not before.items() & outside.entries().items(), began)
        parts.heal()
        self.say(f"none of {len(before)} entries is left after {empty_s:.1f} s")
        last_s = seconds_until(lambda: not outside.difference(), time.monotonic())
        return {
            "controller_serves_s": serves_s,
            "controller_right_s": right_s,
            "removed_behind": len(removed),
            "noticed_s": noticed_s,
            "master_killed_at": killed_at,
            "master_empty_s": empty_s,
            "right_at_last_s": last_s,
        }

    def steady(self) -> dict[str, Any]:
        """Publish until the high watermark, and then 1.2 times the capacity a minute."""
        options = self.options
        seconds = options.steady_seconds
        with self.workers(publish, options.load()) as workers:
            self.say(f"publishing until the store is full, and then at a pace for {seconds:g} s")
            heard = []
            for nbytes, pace in ((HIGH * options.segment, 0.0), (1.2 * options.segment * seconds / 60.0, seconds)):
                for worker in workers:
                    worker.tell(nbytes=nbytes / PROCESSES, seconds=pace)
                heard = [worker.hear() for worker in workers]
            ended = time.monotonic()
            for worker in workers:
                worker.tell()
        samples = self.watch.between(ended - seconds, ended)
        return {
            "puts": dict(sum((Counter(each["counts"]) for each in heard), Counter[str]())),
            "seconds": max(each["seconds"] for each in heard),
            "to_capacity": sum(each["nbytes"] for each in heard) / options.segment,
            "most_used": max(sample.used / sample.capacity for sample in samples),
        }


def puts_of(counts: Iterator[dict[str, float]]) -> dict[str, int]:
    """What became of publications, by the word, of all clients together."""
    puts: Counter[str] = Counter()
    for each in counts:
        puts.update({name[4:]: int(n) for name, n in each.items() if name.startswith("put.")})
    return dict(puts)


def refused(puts: dict[str, int]) -> float:
    """The share of them that the store had no room for, in percent."""
    return 100.0 * puts.get("no_space", 0) / sum(puts.values())


def bars(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised of the parts that ran, and what is."""
    rows: list[tuple[str, float, str, float]] = []
    if load := figures.get("load"):
        away = 100.0 * abs(load["hit_ratio"] - load["simulated_hit_ratio"])
        rows += [
            ("most of the store that was used, %", 100.0 * load["most_used"], "<", 100.0 * (HIGH + SLACK)),
            ("least, once it was full, %", 100.0 * load["least_used"], ">", 100.0 * (LOW - SLACK)),
            ("hits, points away from the simulation's", away, "<", 3.0),
            ("embeddings of another key", len(load["wrong"]), "<", 1),
            ("errors in clients", len(load["errors"]), "<", 1),
            ("controller restarted: directory right, s after it serves", load["controller_right_s"], "<", 10.0),
            ("objects removed behind its back: noticed after, s", load["noticed_s"], "<", RECONCILE_S + TTL_S),
            ("master restarted: directory empty after, s", load["master_empty_s"], "<", 10.0),
            ("master restarted: served from before", len(load["served_from_before"]), "<", 1),
        ]
    if steady := figures.get("steady"):
        rows.append(("1.2 capacities a minute: puts refused, %", refused(steady["puts"]), "<", 1.0))
    if raced := figures.get("race"):
        rows += [
            ("race: removals of the one key", raced["removed"], ">", 5),
            ("race: entries without bytes", len(raced["false"]) + len(raced["unreadable"]), "<", 1),
            ("race: removed, though committed after that was decided", len(raced["wronged"]), "<", 1),
            ("race: wrong embeddings, and errors", raced["failures"], "<", 1),
        ]
    return [
        {
            "bar": bar,
            "value": value,
            "bound": f"{sign} {bound:g}",
            "met": value < bound if sign == "<" else value > bound,
        }
        for bar, value, sign, bound in rows
    ]


def run(parts: Sequence[str], options: Options, say: Console) -> dict[str, Any]:
    """The figures of these parts."""
    figures: dict[str, Any] = {}
    for part in parts:
        if part == "race":
            say.print(f"eight processes race on one key, for {options.race_seconds:g} s", highlight=False)
            figures[part] = race(options.race_seconds)
            continue
        with contextlib.ExitStack() as stack:
            bench = Bench(options, stack, say)
            figures[part] = bench.steady() if part == "steady" else bench.under_load()
    return figures


def main() -> None:
    """Run it."""
    defaults = Options()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which (default: all)")
    parser.add_argument("--policy", choices=get_args(PolicyName), default=defaults.policy)
    parser.add_argument("--kind", choices=KINDS, default=defaults.kind, help="of the requests (default: two models)")
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="of the load (default: 120)")
    parser.add_argument("--rate", type=float, default=defaults.rate, help="requests a second (default: 80)")
    parser.add_argument("--footprint", type=parse_size, default=defaults.footprint, help="default: 2GiB")
    parser.add_argument("--lease", type=float, default=defaults.lease_s, help="the store's, in seconds (default: 1)")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    options = defaults._replace(
        policy=given.policy,
        kind=given.kind,
        seconds=given.seconds,
        rate=given.rate,
        footprint=given.footprint,
        lease_s=given.lease,
        seed=given.seed,
    )
    figures = run(given.parts, options, Console(stderr=True))
    figures["bars"] = bars(figures)
    table = Table(title=f"Capacity, {options.policy}")
    for column in ("bar", "value", "bound", ""):
        table.add_column(column, justify="left" if column == "bar" else "right")
    for row in figures["bars"]:
        table.add_row(row["bar"], f"{row['value']:.2f}", row["bound"], "met" if row["met"] else "NOT MET")
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(not all(row["met"] for row in figures["bars"]))


if __name__ == "__main__":
    main()
