"""How many acquires a controller answers on one core, how fast beside that load, and how much memory entries take.

The controller is a real process, pinned to one core; the load comes over real sockets from another one. A request is
for 16 keys; its mix says how many of them are there, and how many are new: these are granted, and committed with one
message, which belongs to the request. The baseline is the same loop and the same messages without any decision.

Rates depend on who else uses the core. Processor time of an acquire (of all threads of the server, with its commit)
hardly does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from rich.console import Console
from rich.table import Table

from benchmarks.control_load import (
    BATCH,
    COMMITS,
    INFO,
    MIXES,
    Client,
    Keys,
    Mix,
    beside,
    fill,
    resolutions,
    saturate,
)
from benchmarks.control_server import CONTROLLER, Server, baseline, cores, running
from mmcache.metrics import nearest_rank

BAR_MIX = "mixed"

Context = zmq.Context[zmq.Socket[bytes]]


class Load(NamedTuple):
    """What makes a run: so many requests of so many clients, `window` of each under way at a time.

    `seconds` is the length of those in which the rate is given instead.
    """

    clients: int
    window: int
    requests: int
    seconds: float


class Contender:
    """A server under load, the clients that make it, and the keys that they ask for."""

    def __init__(self, server: Server, context: Context, load: Load) -> None:
        self.server = server
        self.load = load
        self.keys = Keys()
        self.clients = [Client(context, server.address) for _ in range(load.clients)]
        self.probe = Client(context, server.address)
        fill(self.probe, batches(self.keys.hot))

    def run(self, mix: Mix) -> tuple[float, float]:
        """Requests a second, and seconds of the server's processor time for each."""
        for client in self.clients:
            client.prepare(mix, self.keys, self.load.requests // self.load.clients)
        count = sum(client.left for client in self.clients)
        gc.collect()
        before = self.server.cpu_seconds()
        seconds = saturate(self.clients, self.load.window)
        return count / seconds, (self.server.cpu_seconds() - before) / count

    def latencies(self, mix: Mix, rate: float) -> list[float]:
        """Sorted seconds of single acquires of a closed loop, beside `rate` requests a second of the same mix."""
        for client in self.clients:
            client.prepare(mix, self.keys, int(rate * self.load.seconds / self.load.clients))
        self.probe.prepare(mix, self.keys, int(rate * self.load.seconds))
        gc.collect()
        return sorted(beside(self.probe, self.clients, rate))

    def close(self) -> None:
        for client in (self.probe, *self.clients):
            client.socket.close()


def batches(mm_hashes: Sequence[str]) -> Iterator[list[str]]:
    return (list(mm_hashes[start : start + COMMITS]) for start in range(0, len(mm_hashes), COMMITS))


def percentiles(ordered: Sequence[float], prefix: str) -> dict[str, float]:
    """The middle, the 99th percentile and the longest of some seconds, in µs."""
    named = {"p50": nearest_rank(ordered, 50), "p99": nearest_rank(ordered, 99), "longest": ordered[-1]}
    return {f"{prefix}{name}_us": value * 1e6 for name, value in named.items()}


def mixes(context: Context, core: int, load: Load, *, runs: int) -> Iterator[dict[str, Any]]:
    """Of each mix: rate, processor time, and latency at half of that rate; the baseline's run by run in turn."""
    for name, mix in MIXES.items():
        with running(CONTROLLER, core) as server, running(baseline(mix.hits), core) as stock:
            contenders = {"": Contender(server, context, load), "baseline_": Contender(stock, context, load)}
            measured: dict[str, list[tuple[float, float]]] = {prefix: [] for prefix in contenders}
            for run in range(runs + 1):
                for prefix, contender in contenders.items():
                    figures = contender.run(mix)
                    if run:  # the first one warms up
                        measured[prefix].append(figures)
            row: dict[str, Any] = {"mix": name}
            for prefix, contender in contenders.items():
                rates, costs = zip(*measured[prefix], strict=True)
                row |= {f"{prefix}per_s": statistics.median(rates), f"{prefix}cpu_us": statistics.median(costs) * 1e6}
                row |= percentiles(contender.latencies(mix, statistics.median(rates) / 2), prefix)
                contender.close()
            yield row


def waits(context: Context, core: int, load: Load) -> dict[str, float]:
    """From a commit to its arrival at who waits for it, with nothing else going on."""
    with running(CONTROLLER, core) as server:
        contender = Contender(server, context, load)
        seconds = sorted(resolutions(contender.clients[0], contender.clients[1], contender.keys, load.requests // 5))
        contender.close()
    return percentiles(seconds, "")


def memory(context: Context, core: int, load: Load, *, entries: int) -> dict[str, float]:
    """What a directory of so many entries takes, and how fast the controller is with it."""
    with running(CONTROLLER, core) as server:
        contender = Contender(server, context, load)
        empty = server.resident_bytes()
        left = entries - len(contender.keys.hot)
        fill(contender.probe, (contender.keys.new(min(COMMITS, left - at)) for at in range(0, left, COMMITS)))
        full = server.resident_bytes()
        mix = MIXES[BAR_MIX]
        rate, cost = contender.run(mix)
        figures = {"entries": entries, "resident_MiB": full / (1 << 20), "bytes_per_entry": (full - empty) / entries}
        figures |= {"per_s": rate, "cpu_us": cost * 1e6}
        figures |= percentiles(contender.latencies(mix, rate / 2), "")
        contender.close()
    return figures


def show(figures: dict[str, Any], console: Console) -> None:
    """The figures as tables."""
    table = Table(title=f"requests of {BATCH} keys, and single ones beside half of that rate")
    for heading in ("mix", "a second", "CPU µs", "p50 µs", "p99 µs", "longest"):
        table.add_column(heading, justify="right")
    for row in figures["mixes"]:
        for prefix, label in (("", row["mix"]), ("baseline_", "baseline")):
            measured = ("per_s", "cpu_us", "p50_us", "p99_us", "longest_us")
            table.add_row(label, *(text(row[prefix + figure]) for figure in measured))
    console.print(table)
    table = Table(title=f"waits, and a full directory under the mix {BAR_MIX}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for title, part in (("commit to resolution", "wait"), ("directory", "memory")):
        for name, value in figures[part].items():
            table.add_row(f"{title}: {name.replace('_', ' ')}", text(value))
    console.print(table)


def text(value: float) -> str:
    return f"{value:,.{0 if value >= 1000 else 1}f}" if isinstance(value, float) else f"{value:,}"


def plot(figures: dict[str, Any], path: Path) -> None:
    """Processor time of each mix, beside the baseline's, as a picture."""
    import matplotlib  # noqa: PLC0415 - only where it is asked for

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(7, 4))
    names = [row["mix"] for row in figures["mixes"]]
    axes.bar(names, [row["cpu_us"] for row in figures["mixes"]], label="controller")
    axes.bar(names, [row["baseline_cpu_us"] for row in figures["mixes"]], label="of that: sockets and messages")
    axes.set_ylabel(f"µs of processor time for {BATCH} keys")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="paired runs of each mix (default: 5)")
    parser.add_argument("--requests", type=int, default=10_000, help="requests of each run (default: 10000)")
    parser.add_argument(
        "--entries", type=int, default=1_000_000, help="size of the full directory (default: a million)"
    )
    parser.add_argument("--clients", type=int, default=8, help="connections with a session each (default: 8)")
    parser.add_argument("--window", type=int, default=16, help="requests of each under way at a time (default: 16)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of the runs at half rate (default: 2)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plot", type=Path, help="draw processor time by mix there (needs matplotlib)")
    arguments = parser.parse_args()
    load = Load(arguments.clients, arguments.window, arguments.requests, arguments.seconds)
    chosen = cores()
    os.sched_setaffinity(0, {chosen.load})
    console = Console(stderr=True)
    figures: dict[str, Any] = {"batch": BATCH, "info_bytes": len(INFO), "runs": arguments.runs, **load._asdict()}
    figures["mixes"] = []
    with console.status("starting") as status, zmq.Context() as context:
        for row in mixes(context, chosen.server, load, runs=arguments.runs):
            status.update(f"after {row['mix']}")
            figures["mixes"].append(row)
        status.update("waits")
        figures["wait"] = waits(context, chosen.server, load)
        status.update(f"a directory of {arguments.entries} entries")
        figures["memory"] = memory(context, chosen.server, load, entries=arguments.entries)
    show(figures, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if arguments.plot:
        plot(figures, arguments.plot)


if __name__ == "__main__":
    main()
