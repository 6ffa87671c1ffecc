"""`mmcache pin`, `unpin` and `pins` against a real cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster import wait_until
from commands import KEY, Ran, run
from serving import Serving, key_of

OPERATOR = "operator-" + "o" * 20
TOKENS = f"- {{name: alice, role: operator, token: {OPERATOR}}}"
LONG = 120.0


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """A cluster whose controller knows where the store's metrics are, and so its capacity."""
    with Serving(segment_bytes=64 << 20, admin_tokens=TOKENS) as serving:
        serving.controller.kill()
        config = json.loads(serving.controller._config.read_text())
        config["store"]["metrics"] = serving.store.metrics
        serving.controller._config.write_text(json.dumps(config))
        serving.controller.start()
        cache = serving.connect()
        for number in range(3):
            assert cache.put(key_of(number), torch.ones(8)).readable
        wait_until(lambda: pin(serving, "--mm-hash", "x", "--ttl", "1s").status == 0, timeout=LONG, what="the capacity")
        yield serving


def pin(serving: Serving, *options: str) -> Ran:
    return run("pin", *options, config=serving.config)


def listed(serving: Serving, *options: str) -> Ran:
    admin = {"MMCACHE_CONTROL__ADMIN": serving.controller.admin, "MMCACHE_TOKEN": OPERATOR}
    return run("pins", *options, config=serving.config, **admin)


def test_what_matches_is_pinned_listed_and_unpinned(serving: Serving) -> None:
    made = pin(serving, *KEY, "--no-lora", "--ttl", "12h", "--reason", "a launch", "--json")
    assert made.status == 0, made.err
    assert (made.json["entries"], made.json["selector"]) == (3, {"model": "encoder", "version": "1", "lora": None})
    assert abs(made.json["until"] - time.time() - 12 * 3600) < LONG
    again = pin(serving, *KEY, "--no-lora", "--ttl", "1s")
    assert again.out.startswith(f"pin {made.json['id']}: model=encoder, version=1, lora=None; 3 known entries, ")
    [newest] = [json.loads(line) for line in listed(serving, "--limit", "1", "--json").out.splitlines()]
    assert (newest["id"], newest["reason"]) == (made.json["id"], "a launch")
    assert "without lora" in listed(serving).out
    other = run("unpin", *KEY, config=serving.config)
    assert (other.status, other.out) == (1, "0 pins ended\n"), "which is another selector"
    assert "there is no such pin" in other.err
    ended = run("unpin", str(made.json["id"]), config=serving.config)
    assert (ended.status, ended.out) == (0, "1 pin ended\n")
    assert pin(serving, "--mm-hash", "y", "--ttl", "500ms").status == 0
    assert run("unpin", "--mm-hash", "y", "--json", config=serving.config).json["ended"] in (0, 1)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--model", "m"], "--ttl"),
        (["--ttl", "1h"], "--model M"),
        (["--model", "m", "--ttl", "1"], "--ttl must be a duration"),
        (["--model", "m", "--ttl", "-1s"], "--ttl"),
        (["--model", "m", "--ttl", "0s"], "--ttl must be seconds above 0"),
        (["--model", "m", "--ttl", "721h"], "30 days"),
        (["--model", "two words", "--ttl", "1h"], "model"),
        (["--lora", "d", "--no-lora", "--ttl", "1h"], "--no-lora"),
        (["--model", "m", "--ttl", "1h", "--reason", "r" * 600], "reason"),
        (["--model", "m", "--ttl", "1h", "--all"], "--all"),
    ],
)
def test_a_wrong_option_is_named(serving: Serving, options: list[str], word: str) -> None:
    refused = pin(serving, *options)
    assert (refused.status, word in refused.err) == (2, True), refused.err


@pytest.mark.parametrize("options", [[], ["7", "--model", "m"], ["0"], ["x"], [str(1 << 63)]])
def test_what_names_no_pin_is_refused(serving: Serving, options: list[str]) -> None:
    refused = run("unpin", *options, config=serving.config)
    assert (refused.status, bool(refused.err)) == (2, True)


def test_without_a_controller_it_says_so(tmp_path: Path) -> None:
    config = tmp_path / "client.yaml"
    config.write_text("control: {address: 'tcp://127.0.0.1:1'}\nclient: {connect_timeout: 1s}\n")
    for command in (["pin", "--ttl", "1h", "--model", "m"], ["unpin", "7"]):
        ended = run(*command, config=config)
        assert (ended.status, "127.0.0.1:1" in ended.err) == (1, True)
