"""What the tests share: patient settings, engines that use a cluster, and what is right in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_engines import LocalEngine, Options, Picture, Request, ServedEngine

from mmcache.config import without_settings

PATIENCE_S = 120.0
PATIENT_CLIENT = {
    "pool_bytes": "32MiB",
    "read_timeout": PATIENCE_S,
    "publish_timeout": PATIENCE_S,
    "connect_timeout": PATIENCE_S,
}
PATIENT = {
    "staging_bytes": "16MiB",
    "fetch_timeout": PATIENCE_S,
    "wait_timeout": 2 * PATIENCE_S,
    "connect_timeout": PATIENCE_S,
}
EXACT = {"dtype": "float32"}
"""In bfloat16 a token may depend on which requests share a step."""


def options(
    model: str,
    config: Path | str,
    role: str,
    *,
    extra: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> Options:
    """An engine that uses the cache, in float32 and patient unless told otherwise."""
    return Options(
        model,
        connector="mmcache",
        role=role,
        extra={"config": str(config), **PATIENT, **(extra or {})},
        arguments={**EXACT, **arguments},
        environment=environment or {},
    )


def expect(engine: LocalEngine, plain: LocalEngine, *requests: Request) -> None:
    """The engine answers these, one after another, as one without a cache does."""
    for request in requests:
        [answer], [right] = engine.generate(request), plain.generate(request)
        assert not answer.error
        assert answer.tokens == right.tokens, request


def expect_at_once(engine: LocalEngine, plain: LocalEngine, *requests: Request) -> None:
    """The engine answers these, all sent at once, as one without a cache answers each alone."""
    right = [plain.generate(request)[0].tokens for request in requests]
    answers = engine.generate(*requests)
    assert [answer.error for answer in answers] == [""] * len(answers)
    assert [answer.tokens for answer in answers] == right


def figure(engine: LocalEngine | ServedEngine, name: str) -> float:
    """A counter of ours, such as `hits` or `misses{reason="absent"}`."""
    family, brace, label = name.partition("{")
    return engine.metrics().get(f"vllm:mmcache_ec_{family}_total{brace}{label}", 0.0)


def wait_for_figure(engine: LocalEngine | ServedEngine, name: str, least: float) -> None:
    """Wait until a counter of ours has grown to `least`; an idle engine's does not."""
    deadline = time.monotonic() + PATIENCE_S
    while (value := figure(engine, name)) < least:
        assert time.monotonic() < deadline, f"{name} is {value}, and not {least}, after {PATIENCE_S:g} s"
        time.sleep(0.05)


def invalidate(config: Path | str, *arguments: str, engines: Sequence[ServedEngine] = ()) -> None:
    """By the command: invalidate, wait until that is complete, and have these engines clear what they hold."""
    urls = [argument for engine in engines for argument in ("--engine", engine.url)]
    command = [sys.executable, "-m", "mmcache.cli", "invalidate", "--wait", "--json", "-c", str(config)]
    made = subprocess.run(
        [*command, "--timeout", str(PATIENCE_S), *arguments, *urls],
        env=without_settings(os.environ),
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )
    assert made.returncode == 0, made.stderr + made.stdout
    said = json.loads(made.stdout)
    assert said["complete"]
    assert [told["ok"] for told in said.get("engines", [])] == [True] * len(engines)


class Pictures:
    """New pictures, which no engine has seen."""

    def __init__(self, first: int) -> None:
        self._next = first

    def __call__(self, *, width: int = 56, height: int = 56) -> Picture:
        self._next += 1
        return Picture(self._next, width, height)


def serve_again(producer: LocalEngine, consumer: LocalEngine, pictures: Pictures) -> None:
    """What the producer encodes, the consumer loads, soon, and from then on."""
    deadline, in_a_row = time.monotonic() + PATIENCE_S, 0
    while in_a_row < 3:
        assert time.monotonic() < deadline, f"the cache is of no use any more: {_ours(producer)} {_ours(consumer)}"
        request = Request([pictures(), "again"])
        assert not producer.generate(request)[0].error
        before = consumer.encoded()
        assert not consumer.generate(request)[0].error
        in_a_row = in_a_row + 1 if consumer.encoded() == before else 0


def tokens(engine: LocalEngine, requests: Sequence[Request]) -> list[list[int]]:
    """What it generates for each, one after another."""
    return [engine.generate(request)[0].tokens for request in requests]


def _ours(engine: LocalEngine) -> dict[str, float]:
    return {name: value for name, value in engine.metrics().items() if "mmcache" in name and value}
