"""An invalidation and what an engine holds of its own: `mmcache invalidate --engine`, as docs/vllm.md says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_caches import Pictures, invalidate, options
from vllm_engines import ServedEngine, started

from benchmarks.parts import Parts

pictures = Pictures(9000)


@pytest.fixture(scope="module")
def held(model, cluster: Parts) -> Iterator[ServedEngine]:
    engine = ServedEngine(options(model("vision"), cluster.config, "ec_both", enable_prefix_caching=True), name="held")
    with started(engine):
        yield engine


@pytest.mark.parametrize(("field", "paused"), [("--mm-hash", False), ("--model", True)])
def test_what_an_engine_holds_is_encoded_anew_only_once_it_is_cleared(
    held: ServedEngine, model, cluster: Parts, field: str, paused: bool
) -> None:
    picture = pictures()
    identifier = f"picture-{field.strip('-')}"
    value = identifier if field == "--mm-hash" else model("vision")

    def encodes() -> int:
        """How many items the engine encodes for the same request."""
        before = held.encoded()
        answer = held.chat(picture, "what is it?", uuids=[identifier])
        assert not answer.error
        return held.encoded() - before

    assert encodes() == 1
    assert encodes() == 0
    invalidate(cluster.config, field, value)
    assert encodes() == 0, "which is what the engine holds of its own"
    if paused:
        held.post("/pause?mode=keep&clear_cache=false")  # or it clears its caches for that already
    invalidate(cluster.config, field, value, engines=[held])
    if paused:
        held.post("/resume")
    assert encodes() == 1
    assert encodes() == 0


def test_caches_are_emptied_between_requests_that_go_on(held: ServedEngine, cluster: Parts) -> None:
    """Without a pause too: the prefix cache is cleared as soon as no request uses it."""
    with held.begin(pictures(), "go on", max_tokens=200) as running:
        invalidate(cluster.config, "--version", "nobody's", engines=[held])
        assert not running.answer().error
    assert not held.chat(pictures(), "and now?").error
