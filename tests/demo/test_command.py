"""`mmcache demo` as people run it: a real cluster, real processes, a real (small) vision transformer."""

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from mmcache.cli.demo import run
from mmcache.cli.demo.photographs import SHIPPED, shipped_directory
from mmcache.cli.demo.protocol import Answer, Command, Finish, Finished, Read, Ready, Served
from mmcache.cli.main import app
from mmcache.key import EmbeddingKey

DEMO = [sys.executable, "-m", "mmcache.cli", "demo"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Four photographs, one of them there twice, and a file that is none."""
    directory = tmp_path / "images"
    directory.mkdir()
    for name in SHIPPED[:4]:
        (directory / name).write_bytes((shipped_directory() / name).read_bytes())
    (directory / "again.png").write_bytes((directory / SHIPPED[0]).read_bytes())
    (directory / "notes.txt").write_text("no image")
    return directory


def test_each_photograph_is_encoded_once_and_every_read_is_checked(
    images: Path, tiny_weights: Path, tmp_path: Path
) -> None:
    command = [*DEMO, "--json", "--images", str(images), "--weights", str(tiny_weights), "--requests", "60"]
    another_cluster = {
        "MMCACHE_CONFIG": "/nowhere",
        "MMCACHE_STORE__MASTER": "127.0.0.1:1",
        "MMCACHE_CLIENT__VERIFY": "?",
    }
    environment = {"PATH": "", "TMPDIR": str(tmp_path), **another_cluster}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=150, check=False)
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["problems"] == []
    assert report["unique_images"] == report["encodes"] == report["encode"]["count"] == 4
    assert report["requests"] == report["prefills"]["requests"] == report["hit"]["count"] == 60
    assert report["embeddings_checked"] == 120
    assert report["prefills"]["encodes"] == 0
    assert report["prefills"]["local_hits"] + report["prefills"]["remote_hits"] == 60
    assert b"notes.txt" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("mmcache-demo")] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_leaves_nothing_behind_however_it_ends(
    images: Path, tiny_weights: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = [*DEMO, "--images", str(images), "--weights", str(tiny_weights)]
    environment = {"PATH": "", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if b"loading the vision transformer" in line:  # the cluster serves, and the workers run
                break
        started = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(number)
        assert demo.wait(60) in (128 + number, -number)
    assert len(started) >= 8  # mmcache up and its three parts, two encoders, two prefills
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []
    left = [path for path in tmp_path.iterdir() if path.name.startswith("mmcache-demo")]
    assert number == signal.SIGKILL or left == []


def test_a_wrong_directory_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for option, directory, message in (
        ("--images", tmp_path, "holds no image"),
        ("--images", tmp_path / "nowhere", "is not a directory"),
        ("--weights", tmp_path, "config.json: No such file or directory\n"),
    ):
        result = CliRunner().invoke(app, ["demo", "--json", option, str(directory)])
        assert result.exit_code == 2
        assert option in result.stderr
        assert message in result.stderr
        assert result.stdout == ""


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "PIL" else found(name, *rest))
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "needs Pillow: pip install 'mmcache[demo]'" in result.stderr


class ScriptedWorkers(contextlib.nullcontext):
    """What the demo hears of its processes, without any; with a fault in one of them."""

    fault = ""

    def __init__(self, *_: object) -> None:
        super().__init__(self)
        self._answers: deque[tuple[str, Answer]] = deque()
        self._encoded: set[str] = set()

    def start(self, name: str, _: object) -> None:
        self._answers.append((name, Ready()))

    def send(self, name: str, command: Command) -> None:
        self._answers.append((name, Finished({}) if isinstance(command, Finish) else self._serve(name, command)))

    def receive(self, *, deadline: float) -> tuple[str, Answer]:
        return self._answers.popleft()

    def _serve(self, name: str, command: Command) -> Served:
        key = command.key if isinstance(command, Read) else EmbeddingKey("model", "1", command.mm_hash)
        differs = command.request == 0 and self.fault == f"{name.partition('-')[0]} differs"
        encodes = name.startswith("encoder") and (key.mm_hash not in self._encoded or self.fault == "encodes again")
        self._encoded.add(key.mm_hash)
        digest = "other bits" if differs else key.mm_hash
        return Served(command.request, key, "store", 1.0, 9.0 if encodes else None, nbytes=1, digest=digest)


@pytest.mark.parametrize(
    ("fault", "status", "problem"),
    [
        ("", 0, ""),
        ("prefill differs", 1, "a prefill process got (store) differs from a direct encode"),
        ("encoder differs", 1, "an encoder got (store) differs from a direct encode"),
        ("encodes again", 1, "was encoded"),
    ],
)
def test_a_difference_or_more_encodes_than_photographs_exit_with_1(
    images: Path, monkeypatch: pytest.MonkeyPatch, fault: str, status: int, problem: str
) -> None:
    cluster = SimpleNamespace(check=None, client_file=Path("client.yaml"))
    monkeypatch.setattr(run, "DemoCluster", lambda _: contextlib.nullcontext(cluster))
    monkeypatch.setattr(run, "Workers", ScriptedWorkers)
    monkeypatch.setattr(ScriptedWorkers, "fault", fault)
    result = CliRunner().invoke(app, ["demo", "--json", "--images", str(images), "--requests", "8"])
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"]) == (status, not status)
    assert (report["encodes"] > report["unique_images"]) == (fault == "encodes again")
    assert bool(report["problems"]) == bool(status)
    assert all(problem in told for told in report["problems"])
