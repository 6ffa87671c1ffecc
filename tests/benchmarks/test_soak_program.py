"""The soak runs, counts, ends by itself and by Ctrl-C, and sees what should not be."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import soak_content as content
from benchmarks import soak_resources
from benchmarks.soak_load import Figures, Load

ROOT = Path(__file__).parents[2]
SHORT = ["--clients", "1", "--no-visitors", "--warm-up", "1", "--fault-every", "0.7", "--seed", "4"]


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.soak", *SHORT, *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_short_soak_meets_faults_and_no_defects(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    soak = start("--minutes", "0.06", "--json", str(out))
    _, log = soak.communicate(timeout=150)
    figures = json.loads(out.read_text())
    assert figures["defects"] == [], log
    assert soak.returncode == bool(figures["leaks"])
    assert sum(figures["faults"].values()) > 0
    assert figures["counts"]["checked"] > 0
    assert len(figures["rests"]) == 2
    assert figures["rests"][0]["controller"]["sessions"] == 2


def test_ctrl_c_ends_a_soak_with_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    soak = start("--minutes", "5", "--json", str(out))
    assert soak.stderr is not None
    while "at rest" not in soak.stderr.readline():
        assert soak.poll() is None
    soak.send_signal(signal.SIGINT)
    soak.communicate(timeout=60)
    assert json.loads(out.read_text())["interrupted"] is True


def test_a_single_wrong_byte_is_seen() -> None:
    number = next(number for number in range(100) if len(content.specs(number)) == 3)
    tensors = {name: tensor.clone() for name, tensor in content.tensors(number).items()}
    assert content.fault_of(number, tensors) is None
    tensors["deepstack_1"].view(torch.uint8).view(-1)[-1] ^= 1
    assert "wrong bytes: 1 of" in (content.fault_of(number, tensors) or "")


def test_another_keys_content_is_seen() -> None:
    for number in range(200):
        wrong = {name: tensor.roll(1, 0) for name, tensor in content.tensors(number).items()}
        assert content.fault_of(number, wrong) is not None
        assert content.fault_of(number, content.tensors(number)) is None


def test_an_exception_of_the_cache_is_a_defect() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("no such thing")

    figures = Figures()
    load = Load(Broken(), figures, seed=1, epoch=0.0, threads=1, hold_bytes=1, pace_s=0.0)
    load.go()
    while not figures.defects:
        time.sleep(0.001)
    load.end()
    assert all("no such thing" in defect for defect in figures.defects)


CLIENT = {
    "anon": 200 << 20,
    "shared": 64 << 20,
    "fds": 30,
    "fd_names": {"socket": 10},
    "abandoned": 0,
    "threads": 20,
    "thread_names": ["MainThread", "mmcache-io-0", "mmcache-control"],
    "fresh": 1,
    "pool": {
        "capacity": 64 << 20,
        "used": 1000,
        "ready_bytes": 1000,
        "quarantined": 0,
        "held_blocks": 0,
        "waiters": 0,
    },
    "client_claims": 0,
    "client_requests": 0,
    "flights": 0,
    "attachments": 1,
}
REST = {
    "clients": {"one": CLIENT},
    "parts": {
        "master": {"rss": 50 << 20, "fds": 30, "fd_names": {}, "abandoned": 0},
        "sidecar": {"rss": 80 << 20, "fds": 30, "fd_names": {}, "abandoned": 0},
    },
    "controller": {"claims": 0, "waiters": 0, "holds": 0, "sessions": 2, "entries": 10},
    "peers_gone": 10,
}


def changed(**client: object) -> dict[str, Any]:
    return {**REST, "clients": {"one": {**CLIENT, **client}}}


def test_what_came_back_is_no_leak() -> None:
    more_io = [*CLIENT["thread_names"], "mmcache-io-1"]  # type: ignore[misc]
    assert soak_resources.leaks(REST, REST, {}) == []
    assert soak_resources.leaks(REST, changed(threads=21, thread_names=more_io), {}) == []
    assert soak_resources.leaks(REST, changed(fds=50, attachments=21), {}) == []
    assert soak_resources.leaks(REST, changed(fds=40, fd_names={"socket": 20}), {}) == []
    assert soak_resources.leaks(REST, changed(fds=70, fd_names={"socket": 50}, abandoned=40), {}) == []


def test_each_thing_that_did_not_come_back_is_named() -> None:
    pool: dict[str, int] = CLIENT["pool"]  # type: ignore[assignment]
    cases: list[tuple[dict[str, Any], str]] = [
        (changed(anon=400 << 20), "own memory grew from 200 to 400 MiB"),
        (changed(shared=128 << 20), "shared memory"),
        (changed(fds=50), "descriptors"),
        (changed(fds=38, attachments=2), "descriptors"),
        (changed(fds=70, fd_names={"socket": 50}), "sockets grew from 10 to 50"),
        (changed(fds=71, fd_names={"socket": 51}, abandoned=41), "abandoned connections grew from 0 to 41, allowed 40"),
        (changed(threads=40), "native threads"),
        (changed(threads=21, thread_names=["MainThread", "mmcache-control-2", "mmcache-control"]), "threads mmcache-c"),
        (changed(pool={**pool, "held_blocks": 1}), "1 held_blocks"),
        (changed(pool={**pool, "used": 5000}), "4000 bytes of the pool are neither free nor entries"),
        (changed(pool={**pool, "quarantined": 40 << 20}), "bytes quarantined"),
        (changed(client_claims=2), "2 client_claims"),
        (changed(fresh=0), "no session"),
        ({**REST, "controller": {**REST["controller"], "claims": 3}}, "3 claims, not 0"),
        ({**REST, "controller": {**REST["controller"], "sessions": 4}}, "4 sessions, not 2"),
        (
            {
                **REST,
                "parts": {**REST["parts"], "sidecar": {"rss": 900 << 20, "fds": 30, "fd_names": {}, "abandoned": 0}},
            },
            "sidecar: memory grew",
        ),
    ]
    for after, named in cases:
        leaks = soak_resources.leaks(REST, after, {})
        assert len(leaks) == 1, (named, leaks)
        assert named in leaks[0]
