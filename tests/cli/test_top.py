"""`mmcache top`: what it shows of a real cluster, over a restart of its controller, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import termios
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cluster import free_port, wait_until
from commands import run
from rich.cells import cell_len
from serving import Serving, key_of
from up_process import mmcache

from mmcache.cli.top.looks import Account, Capacity, Held, Look, NamedAccount, Room
from mmcache.cli.top.report import HitRatios, report, unanswered
from mmcache.cli.top.screen import MOST_ROWS, redrawn, rows_in, told

TOKEN = "viewer-" + "v" * 20
ENVIRONMENT = {"MMCACHE_TOKEN": TOKEN}


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    tokens = f"- {{name: grafana, role: viewer, token: {TOKEN}}}"
    with Serving(segment_bytes=64 << 20, durable=True, admin_tokens=tokens) as cluster:
        yield cluster


def top_of(serving: Serving, *options: str) -> subprocess.Popen[str]:
    command, environment = mmcache("top", "-c", str(serving.config), "--admin", serving.controller.admin, *options)
    return subprocess.Popen(
        command, env={**environment, **ENVIRONMENT}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_once_tells_what_a_cluster_holds_and_what_that_saves(serving: Serving) -> None:
    writer, reader = serving.connect(), serving.connect()
    for tenant in ("a", "b"):
        assert writer.put(key_of("item", tenant=tenant), torch.ones(1000), cost_ms=30.0).readable
    for _ in range(3):
        assert reader.get(key_of("item", tenant="a")) is not None
    assert reader.get(key_of("absent", tenant="a")) is None

    def once() -> dict[str, Any]:
        admin = serving.controller.admin
        ran = run(
            "top", "--once", "--json", "--interval", "0.1", "--admin", admin, config=serving.config, **ENVIRONMENT
        )
        assert ran.status == 0, ran.err
        return ran.json

    wait_until(lambda: once()["total"]["hits"] == 3, timeout=60, what="what was read")
    wait_until(lambda: once()["hit_ratios"]["entries"] is None, timeout=60, what="an interval without reads")
    shown = once()
    assert shown["hit_ratios_since_start"] == {
        "entries": pytest.approx(3 / 4),
        "nbytes": pytest.approx(3 / 5),
        "encode_time": pytest.approx(90 / 150),
    }
    assert shown["interval_s"] > 0.09
    assert shown["load"] == {"sessions": 2, "claims": 0, "waiters": 0, "removals": 0}
    nbytes = shown["total"]["nbytes"] // 2
    assert {row["name"]: (row["nbytes"], row["hits"]) for row in shown["tenants"]} == {
        "a": (nbytes, 3),
        "b": (nbytes, 0),
    }
    assert [row["name"] for row in shown["models"]] == ["encoder"]
    assert shown["states"]["present"] == {"entries": 2, "nbytes": 2 * nbytes}
    assert (shown["trouble"], shown["restarts"], shown["evicted"], shown["missed"]) == ("", 0, {}, 1)

    told = run("stats", config=serving.config)
    assert "hit ratio since its start: entries 75.0 %, bytes 60.0 %, encode time 60.0 %" in told.out
    people = run(
        "top", "--once", "--interval", "0.1", "--admin", serving.controller.admin, config=serving.config, **ENVIRONMENT
    )
    assert people.status == 0
    for words in (
        "2 sessions, 0 claims, 0 waits, 0 removals to do",
        "75.0 %",
        "encoder",
        "evicted since start (last ",
    ):
        assert words in people.out
    assert "\x1b" not in people.out


def test_a_restart_of_the_controller_is_shown_and_not_the_end(serving: Serving) -> None:
    process = top_of(serving, "--json", "--interval", "0.1")
    try:
        assert process.stdout is not None
        lines = (json.loads(line) for line in process.stdout)
        first = next(lines)
        assert (first["trouble"], first["interval_s"], first["restarts"]) == ("", None, 0)
        assert next(one for one in lines if one["interval_s"])["hit_ratios"] is not None
        serving.controller.kill()
        silent = next(one for one in lines if one["trouble"])
        assert serving.controller.admin in silent["trouble"]
        assert (silent["hit_ratios"], silent["total"]["entries"]) == (None, first["total"]["entries"])
        serving.controller.start()
        again = next(one for one in lines if not one["trouble"])
        assert (again["restarts"], again["interval_s"]) == (1, None)
        assert again["term"] != first["term"]
        later = next(one for one in lines if one["interval_s"])
        assert (later["restarts"], later["term"]) == (1, again["term"])
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (128 + signal.SIGINT, "")


def test_where_it_is_no_terminal_each_interval_is_printed_plainly(serving: Serving) -> None:
    process = top_of(serving, "--interval", "0.1")
    try:
        assert process.stdout is not None
        seen: list[str] = []
        while sum(line.startswith("hit ratio") for line in seen) < 3:
            seen.append(process.stdout.readline())
            assert seen[-1], "it ended"
        assert not any("\x1b" in line for line in seen)
    finally:
        process.kill()
        process.communicate()


def test_on_a_terminal_it_draws_in_place_and_leaves_it_as_it_was(serving: Serving) -> None:
    command, environment = mmcache(
        *("top", "-c", str(serving.config), "--admin", serving.controller.admin, "--interval", "0.1")
    )
    ours, its = pty.openpty()
    try:
        before = termios.tcgetattr(its)
        process = subprocess.Popen(
            command, env={**environment, **ENVIRONMENT, "TERM": "xterm"}, stdin=its, stdout=its, stderr=its
        )
        shown = b""
        try:
            while shown.count(b"\x1b[H") < 3:
                shown += os.read(ours, 65_536)
            process.send_signal(signal.SIGINT)
            wait_until(lambda: process.poll() is not None, timeout=60, what="its end")
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 128 + signal.SIGINT
        assert termios.tcgetattr(its) == before
        modes = {part.split(b"m")[0] for part in shown.split(b"\x1b[")[1:] if part.startswith(b"?")}
        assert not modes, "no mode of the terminal was changed, so that there is none to restore"
        assert b"hit ratio" in shown
    finally:
        os.close(ours)
        os.close(its)


def test_with_nobody_there_it_says_so_and_ends() -> None:
    ran = run("top", "--admin", f"http://127.0.0.1:{free_port()}")
    assert ran.status == 1
    assert "Is controller.admin set" in ran.err
    assert run("top").status == 2, "nobody says where it is"


def test_a_token_that_is_refused_is_a_wrong_setting(serving: Serving) -> None:
    ran = run("top", "--once", "--admin", serving.controller.admin, MMCACHE_TOKEN="x" * 30)
    assert (ran.status, "401" in ran.err) == (2, True)


def account(name: str = "", **fields: float) -> NamedAccount:
    empty: dict[str, Any] = dict.fromkeys(Account.__struct_fields__, 0)
    return NamedAccount(**{**empty, **fields}, name=name)


def test_evictions_are_told_by_reason_in_all_and_lately() -> None:
    first, then = looked(1.0, evicted={"quota": 1200}), looked(2.0, evicted={"quota": 1205, "age": 1})
    assert "evicted since start (last): quota 1,200 (-)" in told(report(first, None), "http://a", 80)
    assert "evicted since start (last 1.0 s): quota 1,205 (5), age 1 (1)" in told(report(then, first), "http://a", 80)


def test_what_the_store_lost_is_told_in_all_and_lately() -> None:
    none, first, then = looked(0.0), looked(1.0, entry_lost=1), looked(2.0, entry_lost=1200, pin_lost=5)
    assert "store: 512 GiB of 1 TiB, 50.0 %" in told(report(none, None), "http://a", 80)
    assert "store: 512 GiB of 1 TiB, 50.0 %, 1 entry lost (-)" in told(report(first, None), "http://a", 80)
    made = report(then, first)
    assert "store: 512 GiB of 1 TiB, 50.0 %, 1,205 entries lost (1,204)" in told(made, "http://a", 80)
    assert unanswered(made, 3.0, "gone").lost is None


def test_restarts_and_what_is_old_fit_80_columns() -> None:
    url = "http://127.0.0.1:32951"
    made = unanswered(report(looked(1.0), None, restarts=12), 1.8e9, f"the admin API at {url}: no connection")
    shown = told(made, url, 80)
    assert shown[0].endswith("12 restarts of the controller")
    assert shown[1].endswith("no connection")


def looked(moment: float, *, term: str = "1", evicted: dict[str, int] | None = None, **fields: float) -> Look:
    lost = {name: int(fields.pop(name.partition(".")[0] + "_lost", 0)) for name in ("entry.lost", "pin.lost")}
    missed = int(fields.pop("missed", 0))
    total = account(**fields)
    rows = [account(f"tenant-{number}\x1b[31m" + "x" * 60, nbytes=number << 40) for number in range(MOST_ROWS + 3)]
    capacity = Capacity(
        term,
        total,
        missed,
        rows,
        rows,
        dict.fromkeys(("present", "removing", "pinned"), Held(1, 2)),
        evicted or {},
        Room(1 << 40, 1 << 39),
    )
    return Look(moment, moment, capacity, {"sessions": 1, "removals": 5, **lost})


def test_an_interval_is_what_grew_in_it() -> None:
    first = looked(1.0, hits=10, missed=10, saved_ms=100.0, published_ms=50.0, evicted={"quota": 3, "age": 1})
    then = looked(
        3.5, hits=40, missed=20, saved_ms=100.0, published_ms=150.0, evicted={"quota": 5, "age": 1, "room": 2}
    )
    made = report(then, first)
    assert (made.interval_s, made.restarts) == (2.5, 0)
    assert made.hit_ratios == HitRatios(30 / 40, None, 0.0)
    assert made.evicted == {"quota": 2, "room": 2}
    assert made.hit_ratios_since_start == HitRatios(40 / 60, None, 0.4)
    assert (made.load.sessions, made.load.claims, made.load.removals) == (1, 0, 5)
    other = report(looked(4.0, term="2"), then, restarts=1)
    assert (other.restarts, other.interval_s, other.hit_ratios, other.evicted) == (2, None, None, None)
    silent = unanswered(made, 9.0, "gone")
    assert (silent.at, silent.trouble, silent.hit_ratios, silent.total) == (9.0, "gone", None, made.total)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 3), (200, 100), (1, 1)])
def test_what_is_drawn_fits_the_terminal_and_moves_nothing_but_our_cursor(width: int, height: int) -> None:
    made = unanswered(report(looked(2.0, hits=5, missed=1), looked(1.0)), 3.0, "\x1b[2J no\nanswer")
    shown = told(made, "http://127.0.0.1:1", width)
    assert all(cell_len(line) <= width for line in shown)
    assert all(line.isprintable() for line in shown), "whatever tenants and models are called"
    assert redrawn(shown, height).count("\n") <= max(1, height - 1)
    fitting = told(made, "http://127.0.0.1:1", width, most_rows=rows_in(height))
    assert len(fitting) <= max(height - 1, len(told(made, "http://127.0.0.1:1", width, most_rows=1)))
    if width == 80:
        assert len(fitting) < height, "all of it"
        assert "and 3 more" in shown
        assert "store: 512 GiB of 1 TiB, 50.0 %" in shown
