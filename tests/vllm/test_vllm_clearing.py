"""An invalidation and what an engine holds of its own: `mmcache invalidate --engine`, as docs/vllm.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from vllm_caches import PATIENCE_S, Pictures, options
from vllm_engines import ServedEngine, started

from benchmarks.parts import Parts
from mmcache.config import without_settings
from mmcache.http_call import call

pictures = Pictures(9000)


class Held(NamedTuple):
    engine: ServedEngine
    url: str
    config: str

    def post(self, target: str) -> None:
        assert call("POST", self.url + target, timeout=PATIENCE_S, body=b"").status == 200

    def invalidate(self, *arguments: str) -> dict[str, Any]:
        """What the command says, once it has succeeded."""
        command = [sys.executable, "-m", "mmcache.cli", "invalidate", "--wait", "--json", "-c", self.config]
        made = subprocess.run(
            [*command, "--timeout", str(PATIENCE_S), *arguments],
            env=without_settings(os.environ),
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE_S,
            check=False,
        )
        assert made.returncode == 0, made.stderr + made.stdout
        return dict(json.loads(made.stdout))


@pytest.fixture(scope="module")
def held(model, cluster: Parts) -> Iterator[Held]:
    made = options(model("vision"), cluster.config, "ec_both", enable_prefix_caching=True)
    engine = ServedEngine(made, name="held")
    with started(engine):
        yield Held(engine, f"http://127.0.0.1:{engine.port}", str(cluster.config))


@pytest.mark.parametrize(("field", "paused"), [("--mm-hash", False), ("--model", True)])
def test_what_an_engine_holds_is_encoded_anew_only_once_it_is_cleared(
    held: Held, model, field: str, paused: bool
) -> None:
    picture = pictures()
    identifier = f"picture-{field.strip('-')}"
    value = identifier if field == "--mm-hash" else model("vision")

    def encodes() -> int:
        """How many items the engine encodes for the same request."""
        before = held.engine.encoded()
        answer = held.engine.chat(picture, "what is it?", uuids=[identifier])
        assert not answer.error
        return held.engine.encoded() - before

    assert encodes() == 1
    assert encodes() == 0
    assert held.invalidate(field, value)["complete"]
    assert encodes() == 0, "which is what the engine holds of its own"
    if paused:
        held.post("/pause?mode=keep")  # of all modes the one that clears nothing by itself
    made = held.invalidate(field, value, "--engine", held.url)
    assert [told["ok"] for told in made["engines"]] == [True]
    if paused:
        held.post("/resume")
    assert encodes() == 1
    assert encodes() == 0


def test_caches_are_emptied_between_requests_that_go_on(held: Held) -> None:
    """Without a pause too: the prefix cache is cleared as soon as no request uses it."""
    picture = pictures()
    with held.engine.begin(picture, "go on", max_tokens=200) as running:
        made = held.invalidate("--version", "nobody's", "--engine", held.url)
        assert [told["ok"] for told in made["engines"]] == [True]
        assert not running.answer().error
    assert not held.engine.chat(pictures(), "and now?").error
