"""Time to first token of pictures in a real vLLM on the CPU, by where their embedding comes from.

Engines without a connector, with vLLM's ECExampleConnector (files on tmpfs) and with mmcache take turns over HTTP, each
with the same new picture, with their processor caches emptied before each request:

    miss         nobody has seen the picture
    local hit    the engine's own encoder cache has it
    hit          the engine has not, and the connector has: files, or what another engine has published

The scheduler's hooks are timed meanwhile, and then what an engine takes while its only request is deferred. It runs in
the environment of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import vllm_models
from benchmarks.parts import Parts
from benchmarks.vllm_media import Picture
from benchmarks.vllm_probe import holding
from benchmarks.vllm_served import Options, ServedEngine

SIDES = (28, 56, 84, 112, 168, 224, 280, 336, 392, 448)
"""Of pictures in pixels, to choose one from whose encoding takes about as long as it should."""
ENCODE_SECONDS = 0.3
TOKENS = 2
ARGUMENTS = {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
"""Scheduler and worker in one process, as where there is one accelerator. (vLLM on a CPU takes "mp" for "uni".)"""
WAIT_SECONDS = 3600.0
"""Of a deferred request: longer than anything here."""
DEFERRED_SECONDS = 10.0
HIT_ABOVE_LOCAL_MS = 15.0
MISS_TO_NONE = 1.05
HOOK_P99_US = 50.0
DEFERRED_CORES = 0.3

_HOOK_COLUMNS = ("p50_us", "p99_us", "most_us", "core_p50_us", "core_p99_us")

Seconds = dict[str, list[float]]


class Engines(NamedTuple):
    """All of them with the same model."""

    none: ServedEngine
    example: ServedEngine
    mmcache: ServedEngine
    reader: ServedEngine
    """Like `mmcache`. It never encodes: that is left to the other."""
    parts: Parts


@contextlib.contextmanager
def engines(model: Path, folder: Path) -> Iterator[Engines]:
    """Start a cluster and the engines, side by side."""
    with contextlib.ExitStack() as stack:
        parts = stack.enter_context(Parts(owner_bytes=512 << 20))
        files = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mmcache-benchmark-"))
        made = {
            "none": Options(str(model), arguments=ARGUMENTS),
            "example": Options(
                str(model), connector="example", extra={"shared_storage_path": files}, arguments=ARGUMENTS
            ),
            "mmcache": mmcache_options(model, parts),
            "reader": mmcache_options(model, parts),
        }
        started = {name: ServedEngine(options, name=name, folder=folder) for name, options in made.items()}
        for engine in started.values():
            stack.callback(engine.end)
        for engine in started.values():
            engine.wait_ready()
        yield Engines(**started, parts=parts)


def mmcache_options(model: Path, parts: Parts) -> Options:
    extra = {"config": str(parts.config), "wait_timeout": WAIT_SECONDS}
    return Options(str(model), connector="timed", extra=extra, arguments=ARGUMENTS)


def first_token(engine: ServedEngine, picture: Picture) -> float:
    """Seconds to the first token of a request, whose picture the processor has not seen."""
    engine.reset_processor()
    answer = engine.chat(picture, "what is it?", max_tokens=TOKENS, stream=True)
    if answer.error:
        raise SystemExit(f"a request failed: {answer.error}\n{engine.log.read_text(errors='replace')[-4000:]}")
    return answer.first_seconds


def choose_side(engine: ServedEngine) -> tuple[int, float]:
    """The pictures' size whose encoding takes about ENCODE_SECONDS here, and what it takes."""
    costs: dict[int, float] = {}
    for side in SIDES:
        times = []
        for seed in range(3):
            before = engine.rpc("probe_encoder")[0]["seconds"]
            first_token(engine, Picture(seed, side, side))
            times.append(engine.rpc("probe_encoder")[0]["seconds"] - before)
        costs[side] = statistics.median(times)
        if costs[side] > ENCODE_SECONDS:
            break
    side = min(costs, key=lambda one: abs(costs[one] - ENCODE_SECONDS))
    return side, costs[side]


def objects(parts: Parts) -> int:
    """How many there are in the store."""
    with contextlib.closing(http.client.HTTPConnection(parts.metrics, timeout=10)) as connection:
        connection.request("GET", "/get_all_keys")
        return connection.getresponse().read().count(b"mmc1.")


def wait_published(parts: Parts, count: int) -> None:
    """Until the store has so many objects, so that the publication of one disturbs no other measurement."""
    deadline = time.monotonic() + 10.0
    while objects(parts) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # the controller's part of it


def measure(place: Engines, side: int, runs: int, warm_up: int = 2) -> Seconds:
    """Paired runs of all cases."""
    seconds: Seconds = {}
    for run, seed in zip(range(warm_up + runs), itertools.count(1000)):
        picture = Picture(seed, side, side)
        before = objects(place.parts)
        taken = {
            "none, miss": first_token(place.none, picture),
            "example, miss": first_token(place.example, picture),
            "mmcache, miss": first_token(place.mmcache, picture),
        }
        wait_published(place.parts, before + 1)
        taken["none, local hit"] = first_token(place.none, picture)
        place.example.reset_encoder()
        for name, engine in (("example", place.example), ("mmcache", place.reader)):
            encoded = engine.encoded()
            taken[f"{name}, hit"] = first_token(engine, picture)
            if engine.encoded() != encoded:
                raise SystemExit(f"the {name} connector missed:\n{engine.log.read_text(errors='replace')[-4000:]}")
        taken["mmcache, local hit"] = first_token(place.mmcache, picture)
        if run >= warm_up:
            for case, value in taken.items():
                seconds.setdefault(case, []).append(value)
    return seconds


def hooks_of(*engines: ServedEngine) -> dict[str, dict[str, float]]:
    """Calls and µs of each hook of the scheduler's side since the last time, in all of these.

    `core` is what it has computed: without that it was kept from a core, or waited.
    """
    figures = {}
    taken = [engine.rpc("probe_hooks")[0] for engine in engines]
    for name in taken[0]:
        if calls := [call for times in taken for call in times[name]]:
            ordered, computed = (sorted(call[clock] for call in calls) for clock in (0, 1))
            p99 = min(len(calls) - 1, len(calls) * 99 // 100)
            figures[name] = {
                "calls": len(calls),
                "p50_us": statistics.median(ordered) / 1e3,
                "p99_us": ordered[p99] / 1e3,
                "most_us": ordered[-1] / 1e3,
                "core_p50_us": statistics.median(computed) / 1e3,
                "core_p99_us": computed[p99] / 1e3,
            }
    return figures


def deferred(place: Engines, side: int) -> dict[str, float]:
    """Cores that an engine's processes use while it is idle, and while its only request waits for another's encoder."""
    figures = {"idle_cores": cores(place.reader), "idle_without_connector_cores": cores(place.none)}
    picture = Picture(99, side, side)
    with contextlib.ExitStack() as requests:
        with holding(place.mmcache) as wait_until_it_encodes:
            requests.enter_context(place.mmcache.begin(picture, "what is it?"))
            wait_until_it_encodes()
            waiting = requests.enter_context(place.reader.begin(picture, "what is it?"))
            deadline = time.monotonic() + 60.0
            while not place.reader.metrics().get("vllm:num_requests_waiting", 0.0):
                if time.monotonic() > deadline:
                    raise SystemExit("the request was not deferred")
                time.sleep(0.05)
            figures["deferred_cores"] = cores(place.reader)
        if waiting.answer().error:
            raise SystemExit("the deferred request failed")
    return figures


def cores(engine: ServedEngine) -> float:
    """How many cores' worth of time all of its processes take."""

    def spent() -> float:
        total = 0.0
        for process in engine.processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    before, started = spent(), time.monotonic()
    time.sleep(DEFERRED_SECONDS)
    return (spent() - before) / (time.monotonic() - started)


def bars(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was promised, and what is."""
    seconds = figures["seconds"]

    def above(case: str, baseline: str) -> float:
        return 1e3 * float(statistics.median(a - b for a, b in zip(seconds[case], seconds[baseline], strict=True)))

    def against(case: str, baseline: str) -> float:
        return float(statistics.median(a / b for a, b in zip(seconds[case], seconds[baseline], strict=True)))

    slowest = max(
        (hook["p99_us"] for name, hook in figures["hooks"].items() if "nothing to run" not in name), default=0.0
    )
    rows = [
        ("hit above local hit, ms", above("mmcache, hit", "none, local hit"), HIT_ABOVE_LOCAL_MS),
        ("hit above ECExampleConnector's, ms", above("mmcache, hit", "example, hit"), 0.0),
        ("miss / without a connector", against("mmcache, miss", "none, miss"), MISS_TO_NONE),
        ("slowest hook of the scheduler at p99, µs", slowest, HOOK_P99_US),
        ("cores of an idle engine with a deferred request", figures["deferred"]["deferred_cores"], DEFERRED_CORES),
    ]
    return [{"bar": bar, "value": value, "at_most": most, "met": value <= most} for bar, value, most in rows]


def show(figures: Mapping[str, Any], console: Console) -> None:
    """The figures as tables."""
    side, encode_ms = figures["side"], figures["encode_ms"]
    table = Table(title=f"Time to first token in ms: pictures of {side} x {side}, {encode_ms:.0f} ms to encode")
    for column in ("case", "median", "least", "most"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case, values in figures["seconds"].items():
        table.add_row(case, *(f"{value * 1e3:.1f}" for value in (statistics.median(values), min(values), max(values))))
    console.print(table)
    table = Table(title="Hooks of the scheduler's side")
    for column in ("hook", "calls", "p50 µs", "p99 µs", "most µs", "core p50 µs", "core p99 µs"):
        table.add_column(column, justify="left" if column == "hook" else "right")
    for name, hook in figures["hooks"].items():
        table.add_row(name, f"{hook['calls']:.0f}", *(f"{hook[key]:.1f}" for key in _HOOK_COLUMNS))
    console.print(table)
    table = Table(title="Cores in use")
    table.add_column("engine")
    table.add_column("cores", justify="right")
    for name, value in figures["deferred"].items():
        table.add_row(name.removesuffix("_cores").replace("_", ", "), f"{value:.3f}")
    console.print(table)
    table = Table(title="Bars")
    for column in ("bar", "value", "at most", ""):
        table.add_column(column, justify="left" if column == "bar" else "right")
    for row in figures["bars"]:
        table.add_row(row["bar"], f"{row['value']:.2f}", f"{row['at_most']:g}", "met" if row["met"] else "NOT MET")
    console.print(table)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_epd", description=__doc__)
    parser.add_argument("--runs", type=int, default=25, help="paired runs (default: 25)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--model", type=Path, help="a folder for the model, which is built there unless it is there")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="mmcache-benchmark-") as temporary, console.status("") as status:
        folder = Path(temporary)
        model = (arguments.model or folder / "tower").absolute()
        if not (model / "config.json").exists():
            status.update("building a model")
            vllm_models.build("tower", model)
        status.update("starting engines")
        with engines(model, folder) as place:
            status.update("choosing a size of pictures")
            side, encode_seconds = choose_side(place.none)
            status.update("taking turns")
            hooks_of(place.mmcache, place.reader)
            seconds = measure(place, side, arguments.runs)
            hooks = hooks_of(place.mmcache, place.reader)
            status.update("deferring a request")
            figures: dict[str, Any] = {
                "runs": arguments.runs,
                "side": side,
                "encode_ms": encode_seconds * 1e3,
                "seconds": seconds,
                "hooks": hooks,
                "deferred": deferred(place, side),
            }
    figures["bars"] = bars(figures)
    show(figures, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
