"""How often the same embedding is computed when several processes want it, and what each kind of answer costs.

Every process follows a stream of its own over the same keys, whose popularity follows Zipf's law; a computation is a
sleep. The baseline, in the same run, is the same streams with a private cache in each process, of any size and for
free. A process that waits is measured besides: from the other's commit to the tensor in its hands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import handover
from benchmarks.cluster import cluster
from benchmarks.crew import Wire, Worker, crew
from mmcache import EmbeddingKey, MMCache
from mmcache.entry import PREFIX_BYTES
from mmcache.metrics import nearest_rank
from mmcache.setting_kinds import parse_size

KINDS = ("local", "store", "waited", "computed")
"""Cheapest first: a call for several keys is of the dearest kind among its embeddings."""


class Load(NamedTuple):
    """What each process does."""

    keys: int
    requests: int
    zipf: float
    nbytes: int
    compute_ms: float
    batch: int
    seed: int


def stream(load: Load, number: int) -> list[list[int]]:
    """The requests of one process: every second one for `batch` keys, the others for one."""
    random = np.random.default_rng((load.seed, number))
    weights = 1.0 / np.arange(1, load.keys + 1) ** load.zipf
    sizes = [1 if request % 2 else load.batch for request in range(load.requests)]
    numbers = random.choice(load.keys, size=sum(sizes), p=weights / weights.sum()).tolist()
    return [[numbers.pop() for _ in range(size)] for size in sizes]


def key_of(number: int) -> EmbeddingKey:
    return EmbeddingKey("benchmark", "dedup", f"item-{number}")


class Encoder:
    """Stands for an encoder: sleeps, and remembers for which keys."""

    def __init__(self, load: Load) -> None:
        self._seconds = load.compute_ms / 1e3
        self._floats = max(1, (load.nbytes - PREFIX_BYTES) // 4)
        self.computed: list[int] = []

    def __call__(self, keys: Sequence[EmbeddingKey]) -> list[torch.Tensor]:
        numbers = [int(key.mm_hash.removeprefix("item-")) for key in keys]
        self.computed += numbers
        time.sleep(self._seconds * len(keys))
        return [torch.full((self._floats,), float(number)) for number in numbers]

    def one(self, key: EmbeddingKey) -> torch.Tensor:
        return self([key])[0]


def work(wire: Wire, number: int, config: str, load_fields: tuple[Any, ...]) -> None:
    """A process: its stream with a private cache, then with the shared one, each when told to begin."""
    load = Load(*load_fields)
    requests = stream(load, number)
    with MMCache.connect(config, strict=True, name=f"dedup-{number}") as cache:
        for answer in (private, shared):
            wire.tell(ready=True)
            wire.hear()
            wire.tell(**answer(requests, Encoder(load), cache))


def private(requests: list[list[int]], encoder: Encoder, _: MMCache) -> dict[str, Any]:
    """A process that keeps all that it computed to itself."""
    mine: dict[int, torch.Tensor] = {}
    began = time.monotonic()
    for numbers in requests:
        missing = [number for number in dict.fromkeys(numbers) if number not in mine]
        mine.update(zip(missing, encoder([key_of(number) for number in missing]), strict=True))
    return {"began": began, "ended": time.monotonic(), "computed": encoder.computed}


def shared(requests: list[list[int]], encoder: Encoder, cache: MMCache) -> dict[str, Any]:
    """A process that shares what it computes; `calls` are (kind, how many keys, seconds)."""
    kinds: Counter[str] = Counter()
    calls: list[tuple[str, int, float]] = []
    waits = 0.0
    began = time.monotonic()
    for numbers in requests:
        keys = [key_of(number) for number in numbers]
        started = time.monotonic()
        if len(keys) == 1:
            found = [cache.get_or_compute(keys[0], partial(encoder.one, keys[0]))]
        else:
            found = cache.get_or_compute_many(keys, encoder)
        seconds = time.monotonic() - started
        for embedding, asked in zip(found, numbers, strict=True):
            if not float(embedding.tensor[0]) == float(embedding.tensor[-1]) == float(asked):
                raise SystemExit(f"item {asked} is another's: {embedding}")
        waits, before = cache.stats().get("wait", 0.0), waits
        of_distinct: dict[int, str] = dict(zip(numbers, (embedding.source for embedding in found), strict=True))
        sources = Counter(of_distinct.values())
        sources["waited"] = min(round(waits - before), sources["store"])
        sources["store"] -= sources["waited"]
        kinds += sources
        calls.append((next(kind for kind in reversed(KINDS) if sources[kind]), len(keys), seconds))
        del found
    ended = time.monotonic()
    return {"began": began, "ended": ended, "computed": encoder.computed, "kinds": dict(kinds), "calls": calls}


def measure(config: Path, load: Load, processes: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Both ways, each with all processes at once."""
    asked = [number for worker in range(processes) for numbers in stream(load, worker) for number in numbers]
    figures: dict[str, Any] = {"asked": len(asked), "distinct": len(set(asked))}
    with crew(processes, work, str(config), tuple(load)) as workers:
        for name in ("private", "shared"):
            progress(f"{processes} processes, {name} cache")
            figures[name] = together(workers, load)
    figures["shared"] |= kinds_of(figures["shared"].pop("told"))
    figures["private"].pop("told")
    for name in ("private", "shared"):
        figures[name]["computed_to_distinct"] = figures[name]["computed"] / figures["distinct"]
    return figures


def together(workers: list[Worker], load: Load) -> dict[str, Any]:
    """Let all begin at once, and put together what they tell."""
    for worker in workers:
        worker.hear()
    for worker in workers:
        worker.tell()
    told = [worker.hear() for worker in workers]
    seconds = max(one["ended"] for one in told) - min(one["began"] for one in told)
    return {
        "computed": sum(len(one["computed"]) for one in told),
        "seconds": seconds,
        "requests_a_second": len(workers) * load.requests / seconds,
        "told": told,
    }


def kinds_of(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Embeddings of each kind, and the latencies of calls in ms, by kind and by one key or several."""
    embeddings = sum((Counter(one["kinds"]) for one in told), Counter())
    calls = [call for one in told for call in one["calls"]]
    kinds: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        row: dict[str, float] = {"embeddings": embeddings[kind]}
        for label, several in (("one", False), ("several", True)):
            seconds = sorted(seconds for of, keys, seconds in calls if of == kind and (keys > 1) is several)
            if seconds:
                row |= {f"{label}_p50_ms": nearest_rank(seconds, 50) * 1e3}
                row |= {f"{label}_p99_ms": nearest_rank(seconds, 99) * 1e3}
        kinds[kind] = row
    return {"kinds": kinds, "call_ms": statistics.median(seconds for _, _, seconds in calls) * 1e3}


def show(figures: dict[str, Any], console: Console) -> None:
    """The figures as tables."""
    table = Table(title=f"{figures['asked']} embeddings asked for, of {figures['distinct']} keys")
    for column in ("cache", "computations", "a key", "requests/s"):
        table.add_column(column, justify="right")
    table.add_row("none", str(figures["asked"]), f"{figures['asked'] / figures['distinct']:.2f}", "")
    for name in ("private", "shared"):
        row = figures[name]
        ratio, speed = f"{row['computed_to_distinct']:.2f}", f"{row['requests_a_second']:.0f}"
        table.add_row(name, str(row["computed"]), ratio, speed)
    console.print(table)
    table = Table(title="What was had, and how long a call took for one key and for several (ms)")
    for column in ("kind", "embeddings", "one p50", "one p99", "several p50", "several p99"):
        table.add_column(column, justify="right")
    for kind, row in figures["shared"]["kinds"].items():
        cells = [f"{label}_{rank}_ms" for label in ("one", "several") for rank in ("p50", "p99")]
        table.add_row(kind, str(row["embeddings"]), *(f"{row[cell]:.2f}" if cell in row else "" for cell in cells))
    console.print(table)
    rested, at_once = (figures["handover"][kind] for kind in ("rested", "at_once"))
    table = Table(title="From the commit to a tensor of 4 MiB in a waiting process: median ms")
    for column in ("figure", "after a pause", "at once"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, value in rested.items():
        if name.endswith("_ms"):
            table.add_row(name.removesuffix("_ms").replace("_", " "), f"{value:.2f}", f"{at_once[name]:.2f}")
    table.add_row("within", *("yes" if claims["within"] else "NO" for claims in (rested, at_once)))
    console.print(table)


def plot(figures: dict[str, Any], path: Path) -> None:
    """Computations, and where the time of a handover goes."""
    import matplotlib  # noqa: PLC0415 - only where it is asked for

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4))
    counts = {"none": figures["asked"], **{name: figures[name]["computed"] for name in ("private", "shared")}}
    left.bar(list(counts), list(counts.values()))
    left.axhline(figures["distinct"], linestyle="--", label="distinct keys")
    left.set_title("Computations, by cache")
    left.legend()
    kinds = {"after a pause": figures["handover"]["rested"], "at once": figures["handover"]["at_once"]}
    bottom = [0.0, 0.0]
    for part in ("to_heard", "to_read", "to_held"):
        heights = [claims[f"{part}_ms"] for claims in kinds.values()]
        right.bar(list(kinds), heights, bottom=bottom, label=part.replace("_", " "))
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    right.plot(list(kinds), [claims["raw_ms"] for claims in kinds.values()], "k_", markersize=60, label="raw transfer")
    right.set_ylabel("ms")
    right.set_title("A waiting process gets 4 MiB")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dedup", description=__doc__)
    parser.add_argument("--processes", type=int, default=4, help="(default: 4)")
    parser.add_argument("--keys", type=int, default=400, help="how many there are to ask for (default: 400)")
    parser.add_argument("--requests", type=int, default=200, help="of each process (default: 200)")
    parser.add_argument("--zipf", type=float, default=0.8, help="exponent of the keys' popularity (default: 0.8)")
    parser.add_argument("--bytes", type=parse_size, default=1 << 20, help="of each embedding (default: 1MiB)")
    parser.add_argument("--compute-ms", type=float, default=20.0, help="of each computation (default: 20)")
    parser.add_argument("--batch", type=int, default=8, help="keys of every second request (default: 8)")
    parser.add_argument("--seed", type=int, default=1, help="of the streams (default: 1)")
    parser.add_argument("--runs", type=int, default=100, help="handovers to a waiting process (default: 100)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plot", type=Path, help="draw them there (needs matplotlib)")
    given = parser.parse_args()
    load = Load(given.keys, given.requests, given.zipf, given.bytes, given.compute_ms, given.batch, given.seed)
    # Twice what is published: the store begins to evict before it is full.
    segment = 2 * (
        load.keys * (load.nbytes + PREFIX_BYTES) + 4 * (given.runs + handover.WARM_UP) * handover.OBJECT_BYTES
    ) + (64 << 20)
    with Console(stderr=True).status("starting a cluster") as status, cluster(str(segment)) as place:
        figures = {"processes": given.processes, **load._asdict()}
        figures |= measure(place.config, load, given.processes, status.update)
        status.update("handovers to a waiting process")
        figures["handover"] = handover.measure(place.config, given.runs)
    show(figures, Console())
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    if given.plot:
        plot(figures, given.plot)


if __name__ == "__main__":
    main()
