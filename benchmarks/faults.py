"""What a fault costs: an engine's calls while one part of the cluster is dead or stopped, and after its return.

Three closed loops of an engine (`get`, `put`, and `get_or_compute` of new keys, nothing local) run before a part is
killed or stopped, during the outage, and after its return; in a fresh cluster and a fresh process each time. The memory
lies with the owner; engines attach to the sidecar, which lends none, or embedded. The baseline of a call in an outage
is the same call before it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fault_engine import Engine
from benchmarks.fault_load import KINDS, Options, Sample
from benchmarks.parts import PARTS, Part, Parts

FAULTS = ("kill", "stop", "restart")
ATTACH = ("sidecar", "embedded")
SEGMENT_BYTES = 1 << 30
BEFORE_SECONDS = 2.0
WATCH_SECONDS = 40.0
"""An engine that is not back by then counts as one that does not come back."""
AFTER_SECONDS = 1.0
"""Watched after everything succeeds again, so that what fails once more is seen."""
OVERDUE_SHARE, OVERDUE_SECONDS = 0.10, 0.020
MEDIAN_SECONDS = 100e-6
BACK_SECONDS = 3.0
REATTACHED_SECONDS = 14.0
"""The store's own clients find a restarted sidecar after 2 to 13 s, and ours may take one more. A sidecar that was
stopped for 10 s may have forgotten its engines' memory as well."""


def inject(victim: Part, fault: str, outage: float) -> tuple[float, float, float]:
    """Break one part and mend it: when it broke, when its mending began, and when it was back."""
    broken = time.monotonic()
    if fault == "stop":
        victim.stop()
        time.sleep(outage)
        mending = time.monotonic()
        victim.resume()
        return broken, mending, mending
    victim.kill()
    if fault == "kill":
        time.sleep(outage)
    mending = time.monotonic()
    victim.start()
    return broken, mending, time.monotonic()


def scenario(part: str, fault: str, attach: str, outage: float, options: Options) -> dict[str, Any]:
    """One fault with one engine: its figures, and its samples with times relative to the fault."""
    with Parts(owner_bytes=SEGMENT_BYTES) as parts, Engine(parts.config_for(attach), options) as engine:
        engine.wait_ready()
        time.sleep(BEFORE_SECONDS)
        broken, mending, returned = inject(parts.parts[part], fault, outage)
        engine.ask("watch", seconds=WATCH_SECONDS, within_seconds=WATCH_SECONDS + 30.0)
        time.sleep(AFTER_SECONDS)
        report = engine.ask("end", within_seconds=300.0)
    reattached = part == "sidecar" and (fault != "stop" or report["stats"].get("attachment_lost", 0))
    bar = REATTACHED_SECONDS if reattached else BACK_SECONDS
    calls = []
    for kind in KINDS:
        samples = [Sample(*sample) for sample in report["samples"][kind]]
        calls.append({"call": kind, **figures_of(samples, bound_of(kind, options), broken, mending, returned)})
        calls[-1]["missed"] = missed(calls[-1], bar)
    return {
        "part": part,
        "fault": fault,
        "attach": attach,
        "back_bar_s": bar,
        "calls": calls,
        **{name: report[name] for name in ("exceptions", "wrong", "stall_seconds", "close_seconds", "stats")},
        "mended_at_s": returned - broken,
        "timeline": {
            kind: [(at - broken, seconds, ok) for at, seconds, ok in report["samples"][kind]] for kind in KINDS
        },
    }


def bound_of(kind: str, options: Options) -> float:
    """Seconds that a call may take: `get_or_compute` has the timeout once to read, and once to publish."""
    return options.timeout * (2 if kind == "compute" else 1)


def figures_of(
    samples: Sequence[Sample], bound: float, broken: float, mending: float, returned: float
) -> dict[str, Any]:
    """What one kind of calls cost; None where nothing of the sort happened.

    `first_failure_*` is the first call that failed after the fault, `outage_*` are the calls from there to the mending.
    """
    before = [one.seconds for one in samples if one.started + one.seconds < broken]
    failing = [one for one in samples if not one.ok and one.started + one.seconds > broken]
    first = failing[0] if failing and failing[0].started < mending else None
    outage = [one for one in samples if first and first.started + first.seconds <= one.started < mending]
    late = [one for one in failing if one.started + one.seconds > returned]
    good = [one for one in samples if one.ok and one.started > (late[-1].started if late else returned)]
    return {
        "before_median_us": statistics.median(before) * 1e6,
        "over_bound_ms": max(one.seconds - bound for one in samples) * 1e3,
        "allowed_ms": (OVERDUE_SHARE * bound + OVERDUE_SECONDS) * 1e3,
        "first_failure_ms": first.seconds * 1e3 if first else None,
        "first_failure_after_s": first.started - broken if first else None,
        "outage_calls": len(outage),
        "outage_failed": sum(not one.ok for one in outage),
        "outage_median_us": statistics.median(one.seconds for one in outage) * 1e6 if outage else None,
        "outage_p90_us": sorted(one.seconds for one in outage)[len(outage) * 9 // 10] * 1e6 if outage else None,
        "back_s": (max(0.0, good[0].started + good[0].seconds - returned) if late else 0.0) if good else None,
    }


def missed(figures: dict[str, Any], back_bar: float) -> list[str]:
    """The bars that one kind of calls missed."""
    bars = {
        "deadline": figures["over_bound_ms"] > figures["allowed_ms"],
        "median": (figures["outage_median_us"] or 0.0) > MEDIAN_SECONDS * 1e6,
        "back": figures["back_s"] is None or figures["back_s"] > back_bar,
    }
    return [name for name, over in bars.items() if over]


COLUMNS: dict[str, Callable[[dict[str, Any]], object]] = {
    "before µs": lambda call: call["before_median_us"],
    "first failure ms": lambda call: call["first_failure_ms"],
    "outage calls": lambda call: call["outage_calls"],
    "failed": lambda call: call["outage_failed"],
    "outage median µs": lambda call: call["outage_median_us"],
    "p90": lambda call: call["outage_p90_us"],
    "over deadline ms": lambda call: call["over_bound_ms"],
    "back s": lambda call: call["back_s"],
}


def show(figures: dict[str, Any], console: Console) -> None:
    """The figures as a table, and what must never happen below it."""
    timeout = f"{figures['timeout_s']:g} s, twice that for get_or_compute"
    table = Table(title=f"One part dead or stopped for {figures['outage_s']:g} s; deadline {timeout}")
    for column in ("part", "fault", "attach", "call"):
        table.add_column(column, no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("misses", style="red", no_wrap=True)
    for row in figures["scenarios"]:
        for call in row["calls"]:
            first = call is row["calls"][0]
            labels = [row[name] if first else "" for name in ("part", "fault", "attach")]
            cells = [text(value(call)) for value in COLUMNS.values()]
            table.add_row(
                *labels, call["call"], *cells, ", ".join(call["missed"]), end_section=call is row["calls"][-1]
            )
    console.print(table)
    for row in figures["scenarios"]:
        for what in ("exceptions", "wrong"):
            if row[what]:
                console.print(f"[red]{row['part']} {row['fault']} {row['attach']}: {what}: {row[what][:3]}")
    exceptions, wrong = (sum(len(row[what]) for row in figures["scenarios"]) for what in ("exceptions", "wrong"))
    stall = max(row["stall_seconds"] for row in figures["scenarios"]) * 1e3
    console.print(f"exceptions in callers: {exceptions}; wrong tensors: {wrong}")
    console.print(f"a thread that only slept woke up {stall:.0f} ms late at most: so much is the machine's")


def text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return "" if value is None else str(value)


def plot(figures: dict[str, Any], path: Path) -> None:
    """Every call's time by when it began, a picture for each fault."""
    import matplotlib  # noqa: PLC0415 - only where it is asked for

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    rows = figures["scenarios"]
    columns = min(2, len(rows))
    lines = -(-len(rows) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(6 * columns, 2.2 * lines), sharex=True, squeeze=False)
    for axis, row in zip(axes.flat, rows, strict=False):
        axis.axvspan(0, row["mended_at_s"], color="0.9")
        for kind in KINDS:
            at, seconds, _ = zip(*row["timeline"][kind], strict=True)
            axis.semilogy(at, seconds, ".", markersize=2, label=kind, rasterized=True)
        axis.set_title(f"{row['part']}, {row['fault']}, {row['attach']}", fontsize=8)
        axis.set_ylim(1e-6, 10)
        axis.grid(visible=True, alpha=0.3)
    axes[0][0].legend(fontsize=7, loc="lower left")
    figure.supxlabel("seconds since the fault")
    figure.supylabel("seconds of a call")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def chosen(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """A type for argparse: some of these words, separated by commas."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        if unknown := set(words) - set(choices):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(choices)}")
        return words

    return parse


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--parts", type=chosen(PARTS), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--faults", type=chosen(FAULTS), default=["kill", "stop"], help=f"of {','.join(FAULTS)}")
    parser.add_argument("--attach", type=chosen(ATTACH), default=list(ATTACH), help=f"of {','.join(ATTACH)}")
    parser.add_argument("--outage", type=float, default=10.0, help="seconds of each outage (default: 10)")
    parser.add_argument("--timeout", type=float, default=1.0, help="each call's deadline in seconds (default: 1)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plot", type=Path, help="draw every call there (needs matplotlib)")
    arguments = parser.parse_args()
    options = Options(timeout=arguments.timeout)
    figures: dict[str, Any] = {"outage_s": arguments.outage, "timeout_s": arguments.timeout, "scenarios": []}
    with Console(stderr=True).status("starting") as status:
        for part in arguments.parts:
            for fault in arguments.faults:
                for attach in arguments.attach:
                    if part == "sidecar" and attach == "embedded":
                        continue  # it has no part in that
                    status.update(f"{part}, {fault}, {attach}")
                    figures["scenarios"].append(scenario(part, fault, attach, arguments.outage, options))
    console = Console()
    show(figures, console if console.is_terminal else Console(width=160))
    if arguments.plot:
        plot(figures, arguments.plot)
    if arguments.json:
        for row in figures["scenarios"]:
            del row["timeline"]  # megabytes that only the plot needs
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
