"""An hour of mixed load with random faults, after which nothing may have leaked.

Client processes of every kind read, publish, compute and wait, while the parts of the cluster below them are stopped,
killed and started again at random. Every byte of every tensor is checked. It exits with 1 when a call raised, a byte
was wrong, or something did not come back to where it was, and says what. The seed makes schedules repeatable, though
not their interleaving.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks import soak_resources
from benchmarks.parts import Parts
from benchmarks.soak_faults import Faults
from benchmarks.soak_fleet import LASTING, Fleet
from mmcache.control.channel import ControlChannel
from mmcache.errors import ControllerUnavailable, DeadlineExceeded

OWNER_BYTES: Final = 512 << 20
SIDECAR_BYTES: Final = 256 << 20
SETTLE_SECONDS: Final = 60.0
"""After the last fault, for sessions of killed clients to end and for a dead writer's names to be let go."""


class Soak:
    """One run. `figures` is there at any time, also after Ctrl-C."""

    def __init__(self, parts: Parts, fleet: Fleet, faults: Faults, channel: ControlChannel, console: Console) -> None:
        self._parts = parts
        self._fleet = fleet
        self._faults = faults
        self._channel = channel
        self._console = console
        self._began = time.monotonic()
        self.rests: list[dict[str, Any]] = []

    def run(self, *, seconds: float, warm_up_s: float, rest_every_s: float, report_every_s: float) -> None:
        """Warm up, rest, then load with faults and now and then a rest, load without faults, and a last rest."""
        self._fleet.start()
        self._load(warm_up_s, faults=False)
        self._rest()
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            self._faults.again()
            self._fleet.go()
            self._load(min(left, rest_every_s), faults=True, report_every_s=report_every_s)
            self._faults.end()
            self._load(warm_up_s, faults=False)  # so that everybody has come back
            self._rest()
        self._fleet.end()

    def _load(self, seconds: float, *, faults: bool, report_every_s: float = 1e9) -> None:
        ends = time.monotonic() + seconds
        report_at = time.monotonic() + report_every_s
        self._fleet.go()
        while time.monotonic() < ends:
            if faults:
                self._faults.tick()
            self._fleet.tick(0.05)
            if time.monotonic() >= report_at:
                report_at += report_every_s
                self._say(progress(self._fleet.figures(), self._faults))

    def _rest(self) -> None:
        self._say("at rest")
        clients = self._fleet.rest()
        controller: dict[str, int] = {}
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(ControllerUnavailable, DeadlineExceeded):
                controller = self._channel.inspect(deadline=time.monotonic() + 2.0)
                expected = len(clients) + 1
                if controller["sessions"] == expected and not any(
                    controller[t] for t in ("claims", "waiters", "holds")
                ):
                    break
            time.sleep(0.5)
        self.rests.append(
            {
                "at_s": round(time.monotonic() - self._began, 1),
                "faults": self._faults.count,
                "clients": clients,
                "parts": soak_resources.of_parts(self._parts),
                "controller": controller,
                "peers_gone": self._faults.peers_gone,
            }
        )
        for leak in self.leaks():
            self._say(f"so far: {leak}")

    def _say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:7.1f} s  {text}", highlight=False, soft_wrap=True)

    def leaks(self) -> list[str]:
        """What the last rest has more than the first."""
        if len(self.rests) < 2:
            return []
        lent = {"owner": OWNER_BYTES, "sidecar": SIDECAR_BYTES}
        return soak_resources.leaks(self.rests[0], self.rests[-1], lent)

    def figures(self) -> dict[str, Any]:
        """All figures; `defects` and `leaks` are empty if all is well."""
        figures = self._fleet.figures()
        figures |= {
            "seconds": round(time.monotonic() - self._began, 1),
            "faults": dict(sorted(self._faults.injected.items())),
        }
        return {**figures, "leaks": self.leaks(), "rests": self.rests}


def progress(figures: dict[str, Any], faults: Faults) -> str:
    """A line on how it goes."""
    counts = figures["counts"]
    calls = sum(number for name, number in counts.items() if name.startswith("call."))
    late = sum(number for name, number in counts.items() if name.startswith("late."))
    had = sum(number for name, number in counts.items() if name.startswith("had."))
    excess = max((value for name, value in figures["largest"].items() if name.startswith("excess.")), default=0.0)
    text = f"{calls} calls, {had} embeddings, {counts.get('missed', 0)} misses, {faults.count} faults, "
    return text + f"{late} late by {excess:.2f} s at most, {len(figures['defects'])} defects"


def show(figures: dict[str, Any], console: Console) -> None:
    """The figures as tables."""
    counts, largest = figures["counts"], figures["largest"]
    table = Table(title=f"Calls in {figures['seconds']:.0f} s")
    for column in ("call", "number", "longest s", "late", "largest excess s", "not by a stall"):
        table.add_column(column, justify="right")
    for name, number in counts.items():
        if name.startswith("call."):
            call = name.removeprefix("call.")
            seconds = [largest.get(f"{kind}.{call}") for kind in ("seconds", "excess", "unexplained")]
            longest, *excess = (f"{value:.3f}" if value is not None else "" for value in seconds)
            table.add_row(call, str(number), longest, str(counts.get(f"late.{call}", "")), *excess)
    console.print(table)
    table = Table(title="What came of them, what was done to the parts, and to the clients")
    table.add_column("what")
    table.add_column("number", justify="right")
    outcomes = {name: number for name, number in counts.items() if not name.startswith(("call.", "late."))}
    for section in (outcomes, figures["stats"], figures["faults"], figures["clients"]):
        for name, number in section.items():
            table.add_row(name, f"{number:.0f}")
        table.add_section()
    console.print(table)
    table = Table(title="At rest: first, and last (memory in MiB)")
    for column in ("process", "figure", "first", "last"):
        table.add_column(column, justify="right")
    for row in resource_rows(figures["rests"]):
        table.add_row(*row)
    console.print(table)
    for kind in ("defects", "leaks"):
        for number, text in enumerate(figures[kind][:20]):
            console.print(f"{kind[:-1]} {number + 1}: {text}", highlight=False, markup=False)
        console.print(f"{len(figures[kind])} {kind}")


def resource_rows(rests: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Process, figure, and its value at the first and at the last rest."""
    rows: list[tuple[str, str, str, str]] = []
    if rests:
        first, last = rests[0], rests[-1]
        for kind in ("clients", "parts"):
            for name in first[kind]:
                for figure in ("rss", "anon", "shared", "fds", "threads", "attachments"):
                    then, now = (rest[kind].get(name, {}).get(figure) for rest in (first, last))
                    if then is not None and now is not None:
                        scale = (1 << 20) if figure in ("rss", "anon", "shared") else 1
                        rows.append((name, figure, f"{then / scale:.0f}", f"{now / scale:.0f}"))
                for figure in ("quarantined", "held_blocks", "ready_bytes"):
                    then, now = (rest[kind].get(name, {}).get("pool", {}).get(figure) for rest in (first, last))
                    if then is not None and now is not None:
                        rows.append((name, f"pool {figure}", f"{then:.0f}", f"{now:.0f}"))
        for figure in ("sessions", "claims", "waiters", "holds", "entries"):
            then, now = (rest["controller"].get(figure) for rest in (first, last))
            rows.append(("controller", figure, str(then), str(now)))
    return rows


def soak(given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run it as asked, and return the figures, also after Ctrl-C."""
    say: Callable[[str], None] = lambda text: (  # noqa: E731
        console.print(f"           {text}", highlight=False, soft_wrap=True, markup=False) if given.verbose else None
    )
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = given.keep
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        parts = stack.enter_context(Parts(owner_bytes=OWNER_BYTES, sidecar_bytes=SIDECAR_BYTES, folder=folder))
        fleet = Fleet(
            parts,
            seed=given.seed,
            epoch=time.monotonic(),
            pace_s=given.pace_ms / 1e3,
            lasting=given.clients,
            visits=not given.no_visitors,
            told=say,
        )
        stack.enter_context(fleet)
        faults = Faults(parts, seed=given.seed, pause_s=given.fault_every, told=say)
        channel = ControlChannel(f"tcp://{parts.controller.address}", name="soak")
        channel.start()
        stack.callback(channel.close)
        run = Soak(parts, fleet, faults, channel, console)
        try:
            run.run(
                seconds=given.minutes * 60,
                warm_up_s=given.warm_up,
                rest_every_s=given.rest_every,
                report_every_s=min(60.0, given.minutes * 15),
            )
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            console.print("ended by Ctrl-C; the figures so far:")
            figures["interrupted"] = True
        figures |= {"seed": given.seed, "minutes": given.minutes, **run.figures()}
    return figures


def main() -> None:
    """Run it; the status is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of load with faults (default: 60)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="of the schedules (printed)")
    parser.add_argument(
        "--fault-every", type=float, default=8.0, help="seconds between faults, on average (default: 8)"
    )
    parser.add_argument("--rest-every", type=float, default=600.0, help="seconds between rests (default: 600)")
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds without faults before each rest (20)")
    parser.add_argument("--pace-ms", type=float, default=20.0, help="pause between a thread's calls (default: 20)")
    parser.add_argument("--clients", type=int, default=len(LASTING), help="that live throughout (default: all)")
    parser.add_argument("--no-visitors", action="store_true", help="without clients that come and go, or are killed")
    parser.add_argument("--keep", type=Path, help="keep all logs in this folder")
    parser.add_argument("--verbose", action="store_true", help="tell of each fault")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    console = Console(stderr=True)
    console.print(f"seed {given.seed}", highlight=False)
    figures = soak(given, console)
    show(figures, Console())
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    if figures["defects"] or figures["leaks"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
