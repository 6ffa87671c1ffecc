"""`mmcache demo` as people run it: a real cluster, real processes, a real (small) vision transformer."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from mmcache.cli.demo.photographs import SHIPPED, shipped_directory
from mmcache.cli.main import app

DEMO = [sys.executable, "-m", "mmcache.cli.main", "demo"]


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
    for option, message in (("--images", "holds no image"), ("--weights", "config.json")):
        result = CliRunner().invoke(app, ["demo", "--json", option, str(tmp_path)])
        assert result.exit_code == 1
        assert message in result.stderr
        assert result.stdout == ""


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "PIL" else found(name, *rest))
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "needs Pillow: pip install 'mmcache[demo]'" in result.stderr
