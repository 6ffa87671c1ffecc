"""What each eviction policy loses: encode time of misses beyond each item's first use, by the share of bytes that fit.

Synthetic traces of multimodal serving, stationary ones and those whose popularity drifts, or files; against
libcachesim's implementations of the same policies. And what a policy with a million entries costs the controller.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import policy_speed
from benchmarks.policy_replay import REFERENCES, has_reference, replay
from benchmarks.policy_traces import KINDS, Trace, read_csv, synthetic
from mmcache.controller.eviction import DEFAULT, POLICIES

BARS_AT: Final = (0.02, 0.10)
"""Shares of the footprint at which the bars are."""
DRAWN_AT: Final = (0.01, 0.02, 0.05, 0.10, 0.20)
OURS: Final = tuple(POLICIES)

Row = dict[str, Any]
Source = Callable[[], Trace]


def study(source: Source, shares: Iterable[float], seed: int, *, reference: bool) -> list[Row]:
    """One trace through all contenders, at each share of its footprint."""
    trace = source()
    contenders = [*OURS, *(f"libcachesim {name}" for name in REFERENCES if reference)]
    rows: list[Row] = []
    for share in shares:
        outcomes = {name: replay(trace, name, int(trace.footprint * share)) for name in contenders}
        rows.append(
            {
                "trace": trace.title,
                "drifting": trace.drifting,
                "seed": seed,
                "share": share,
                "footprint": trace.footprint,
                "compulsory": trace.compulsory_ms / trace.asked_ms,
                "miss_ratio": {name: outcome.miss_ratio for name, outcome in outcomes.items()},
                "lost": {name: outcome.lost_ms / trace.asked_ms for name, outcome in outcomes.items()},
            }
        )
    return rows


def sources(given: argparse.Namespace) -> Iterator[tuple[Source, tuple[float, ...], int]]:
    """What to replay, at which shares, and the seed. Only the first seed is drawn, so only it has more shares."""
    for path in given.trace:
        yield functools.partial(read_csv, path), DRAWN_AT, 0
    if given.trace:
        return
    for seed, kind, drifting in itertools.product(range(1, given.seeds + 1), KINDS, (False, True)):
        source = functools.partial(
            synthetic, kind, drifting=drifting, seed=seed, requests=given.requests, ranks=given.ranks
        )
        yield source, DRAWN_AT if seed == 1 else BARS_AT, seed


def replay_all(given: argparse.Namespace, console: Console) -> list[Row]:
    """All traces, several at once."""
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    with Progress(console=console) as progress, ProcessPoolExecutor(given.processes, mp_context=context) as pool:
        runs = [
            pool.submit(study, source, shares, seed, reference=has_reference())
            for source, shares, seed in sources(given)
        ]
        task = progress.add_task("replaying traces", total=len(runs))
        for run in as_completed(runs):
            rows += run.result()
            progress.advance(task)
    return sorted(rows, key=lambda row: (row["seed"], row["drifting"] or False, row["trace"], row["share"]))


def worst(rows: Iterable[Row], contender: str, baseline: str) -> float:
    """The largest loss of a contender, to that of a baseline on the same trace: 1 is as much."""
    pairs = [(row["lost"][contender], row["lost"][baseline]) for row in rows if row["share"] in BARS_AT]
    return max(1.0 if ours == theirs else ours / theirs if theirs else float("inf") for ours, theirs in pairs)


def bars(rows: list[Row], speed: dict[str, dict[str, float]]) -> list[Row]:
    """What was promised, and what is: always the worst of all traces, shares and seeds."""
    promised: list[tuple[str, float, float]] = []
    for name in REFERENCES:
        away = [
            abs(row["miss_ratio"][name] - row["miss_ratio"][reference]) * 100
            for row in rows
            if (reference := f"libcachesim {name}") in row["miss_ratio"]
        ]
        if away:
            promised.append((f"{name}: misses, points away from libcachesim's", max(away), 1.0))
    stationary = [row for row in rows if row["drifting"] is False]
    drifting = [row for row in rows if row["drifting"]]
    if stationary:
        promised.append((f"{DEFAULT}: lost, to lru's, stationary", worst(stationary, DEFAULT, "lru"), 0.70))
    if drifting:
        promised.append((f"{DEFAULT}: lost, to lru's, drifting", worst(drifting, DEFAULT, "lru"), 1.02))
    promised.append((f"{DEFAULT}: lost, to s3fifo's", worst(rows, DEFAULT, "s3fifo"), 1.0))
    for call in ("insert", "access", "choose", "remove"):
        if speed:
            slowest = max(figures[f"{call}_us"] for figures in speed.values())
            promised.append((f"{call} at a million entries, µs", slowest, 5.0))
    if speed:
        promised.append(("memory, bytes an entry", max(each["bytes_an_entry"] for each in speed.values()), 300.0))
    return [{"bar": bar, "value": value, "bound": bound, "met": value <= bound} for bar, value, bound in promised]


def show(figures: dict[str, Any], console: Console) -> None:
    """Tables: losses of the first seed, speed, bars."""
    rows: list[Row] = figures["rows"]
    contenders = list(rows[0]["lost"])
    for title, values in (("Encode time lost beyond first uses", "lost"), ("Requests that miss", "miss_ratio")):
        table = Table(title=f"{title}, % of all")
        for column in ("trace", "room", *(["first uses"] if values == "lost" else []), *contenders):
            table.add_column(column, justify="left" if column == "trace" else "right")
        for row in rows:
            if row["seed"] == rows[0]["seed"] and row["share"] in BARS_AT:
                cells = [row["trace"], f"{row['share']:.0%}"]
                cells += [f"{row['compulsory']:.1%}"] if values == "lost" else []
                table.add_row(*cells, *(f"{row[values][name]:.1%}" for name in contenders))
        console.print(table)
    if figures["speed"]:
        table = Table(title=f"With {figures['entries']:,} entries: CPU time and memory")
        for column in ("policy", "insert µs", "access µs", "choose µs", "remove µs", "bytes an entry"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for name, speed in figures["speed"].items():
            table.add_row(name, *(f"{value:.1f}" for value in speed.values()))
        console.print(table)
    table = Table(title="Bars: the worst of all traces, shares and seeds")
    for column in ("bar", "value", "bound", ""):
        table.add_column(column, justify="left" if column == "bar" else "right")
    for row in figures["bars"]:
        table.add_row(row["bar"], f"{row['value']:.2f}", f"<= {row['bound']:g}", "met" if row["met"] else "NOT MET")
    console.print(table)


def plot(rows: list[Row], path: Path) -> None:
    """One small drawing a trace: what is lost by how much room there is."""
    import matplotlib  # noqa: PLC0415 - only where it is asked for

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    first = [row for row in rows if row["seed"] == rows[0]["seed"]]
    titles = list(dict.fromkeys(row["trace"] for row in first))
    columns = min(len(titles), len(KINDS))
    lines = -(-len(titles) // columns)
    figure, drawings = pyplot.subplots(lines, columns, figsize=(3.2 * columns, 3.0 * lines), squeeze=False, sharey=True)
    for drawing in drawings.flat[len(titles) :]:
        drawing.set_visible(False)
    for drawing, title in zip(drawings.flat, titles, strict=False):
        of_trace = [row for row in first if row["trace"] == title]
        room = [row["share"] * 100 for row in of_trace]
        for name in of_trace[0]["lost"]:
            lost = [row["lost"][name] * 100 for row in of_trace]
            if name in POLICIES:
                drawing.plot(room, lost, label=name)
            else:
                drawing.plot(room, lost, "x", color="grey" if "lru" in name else "black", markersize=4, label=name)
        drawing.set_title(title, fontsize=9)
        drawing.set_xscale("log")
        drawing.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        drawing.minorticks_off()
        drawing.set_ylim(bottom=0)
        drawing.grid(alpha=0.3)
    for drawing in drawings[-1]:
        drawing.set_xlabel("room, % of the footprint")
    for drawing in drawings[:, 0]:
        drawing.set_ylabel("encode time lost, %")
    drawings[0, -1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy", description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="CSV: name,bytes,cost_ms; repeatable")
    parser.add_argument("--seeds", type=int, default=3, help="of each synthetic trace (default: 3)")
    parser.add_argument("--requests", type=int, default=60_000, help="of a synthetic trace (default: 60000)")
    parser.add_argument("--ranks", type=int, default=6_000, help="items that are asked for again (default: 6000)")
    parser.add_argument(
        "--entries", type=int, default=policy_speed.ENTRIES, help="to time; 0: none (default: a million)"
    )
    parser.add_argument("--processes", type=int, default=2, help="(default: 2)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plot", type=Path, help="draw them there (needs matplotlib)")
    given = parser.parse_args()
    console = Console(stderr=True)
    if not has_reference():
        console.print("libcachesim is not installed (pip install libcachesim): nothing to compare lru and s3fifo with")
    figures: dict[str, Any] = {"requests": given.requests, "ranks": given.ranks, "seeds": given.seeds}
    figures |= {"rows": replay_all(given, console), "entries": given.entries, "speed": {}}
    for name in OURS if given.entries else ():
        with console.status(f"{name} with {given.entries:,} entries"):
            figures["speed"][name] = policy_speed.in_a_process(name, given.entries)
    figures["bars"] = bars(figures["rows"], figures["speed"])
    show(figures, Console())
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    if given.plot:
        plot(figures["rows"], given.plot)


if __name__ == "__main__":
    main()
