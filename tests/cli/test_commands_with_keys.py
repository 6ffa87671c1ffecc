"""Every command that asks a controller with keys, with those of its configuration: right, wrong and of no use."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from cluster import wait_until
from commands import KEY, run
from safetensors.torch import save_file
from secured import Keys, Secured
from serving import Serving
from up_process import Up, mmcache

from mmcache import EmbeddingKey, MMCache


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with Serving(segment_bytes=64 << 20) as serving:
        controller = Secured(serving, tmp_path_factory.mktemp("secured"))
        yield controller
        controller.close()


def test_each_command_works_with_the_keys_of_its_configuration(secured: Secured, tmp_path: Path) -> None:
    config = secured.config(secured.friend)
    file = tmp_path / "one.safetensors"
    save_file({"embedding": torch.arange(4.0)}, file)
    for command in (
        ("put", file, *KEY, "--mm-hash", "one"),
        ("lookup", *KEY, "--mm-hash", "one"),
        ("get", *KEY, "--mm-hash", "one"),
        ("invalidate", "--mm-hash", "one", "--wait"),
        ("stats", "--json"),
    ):
        ran = run(*command, config=config, MMCACHE_CLIENT__CONNECT_TIMEOUT="60s")
        assert ran.status == 0, (command, ran)
    found = {one["name"]: one["status"] for one in run("doctor", "--json", config=config).json["findings"]["cluster"]}
    assert (found["controller"], found["put and read"]) == ("ok", "ok")


@pytest.mark.parametrize("command", [("lookup", *KEY, "--mm-hash", "a"), ("invalidate", "--mm-hash", "a"), ("stats",)])
def test_a_command_with_a_key_that_is_not_allowed_says_so(secured: Secured, command: tuple[str, ...]) -> None:
    ran = run(*command, config=secured.config(secured.stranger), COLUMNS="1000")
    assert ran.status == 1
    assert f"add {secured.stranger.public} to its controller.client_keys_file" in ran.out + ran.err


def test_a_doctor_says_what_is_wrong_with_keys(secured: Secured) -> None:
    bad = secured.make_keys("bad")
    bad.file.chmod(0o644)
    for keys, words in (
        (secured.stranger, "refused this client's key"),
        (None, "wants clients with keys"),
        (bad, "not asked: control.secret_key_file: "),
    ):
        config = secured.config(keys)
        # A busy machine may have no answer for the doctor within its two seconds.
        wait_until(partial(says, config, words), timeout=60.0, what=f"a finding that {words}")


def says(config: Path, words: str) -> bool:
    """Whether the doctor finds that of the controller; a failure it is at any rate."""
    ran = run("doctor", "--json", config=config)
    [finding] = [one for one in ran.json["findings"]["cluster"] if one["name"] == "controller"]
    assert (ran.status, finding["status"]) == (1, "failing")
    assert finding["advice"]
    return words in finding["detail"]


@pytest.mark.parametrize("command", [("lookup", *KEY, "--mm-hash", "a"), ("invalidate", "--mm-hash", "a"), ("stats",)])
def test_a_key_file_of_no_use_is_a_wrong_setting(secured: Secured, command: tuple[str, ...]) -> None:
    gone = secured.make_keys("gone")
    config = secured.config(gone)
    gone.file.unlink()
    ran = run(*command, config=config)
    assert ran.status == 2
    assert f"control.secret_key_file: {gone.file}: cannot be read: No such file" in ran.err


def controller(**environ: str) -> subprocess.Popen[str]:
    command, environment = mmcache("controller", **environ)
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("bind", "with_keys", "warned"),
    [("tcp://0.0.0.0:0", False, True), ("tcp://127.0.0.1:0", False, False), ("tcp://0.0.0.0:0", True, False)],
)
def test_a_controller_that_others_can_reach_without_keys_warns(
    secured: Secured, bind: str, with_keys: bool, warned: bool
) -> None:
    files = {"SECRET_KEY_FILE": str(secured.keys.file), "CLIENT_KEYS_FILE": str(secured.allowed)} if with_keys else {}
    variables = {f"MMCACHE_CONTROLLER__{name}": value for name, value in ({"BIND": bind} | files).items()}
    with controller(**variables) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("controller at ")
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0
    assert ("mmcache keys new" in said) == warned


def test_a_controller_with_bad_files_does_not_start(secured: Secured) -> None:
    with controller(
        MMCACHE_CONTROLLER__BIND="tcp://127.0.0.1:0",
        MMCACHE_CONTROLLER__SECRET_KEY_FILE=str(secured.allowed),  # anybody may read it
        MMCACHE_CONTROLLER__CLIENT_KEYS_FILE=str(secured.allowed),
    ) as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "mmcache controller: controller.secret_key_file: " in said
    assert f"chmod 600 {secured.allowed}" in said


def test_a_cluster_takes_all_keys_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {name: Keys(tmp_path, name) for name in ("controller", "client")}
    (tmp_path / "clients").write_text(f"{ends['client'].public}\n")
    (tmp_path / "clients").chmod(0o644)
    halves = [
        "controller: {secret_key_file: controller.secret, client_keys_file: clients}",
        f'control: {{secret_key_file: client.secret, controller_key: "{ends["controller"].public}"}}',
    ]
    config = tmp_path / "keys.yaml"
    for half in halves:
        config.write_text(half)
        ran = run("up", "--config", config, "--state-dir", tmp_path / "state")
        assert ran.status == 2
        assert "a cluster needs all four, or none" in ran.err
    config.write_text("\n".join(halves))
    monkeypatch.chdir(tmp_path)  # as seen from where it is started
    up = Up(tmp_path / "state", "--config", str(config))
    try:
        client_config = up.wait_ready()["client_config"]
        monkeypatch.chdir("/")
        with MMCache.connect(client_config, strict=True, connect_timeout=60.0) as cache:
            assert cache.put(EmbeddingKey("encoder", "1", "secured"), torch.ones(4)).status == "stored"
    finally:
        up.close()
