"""New weights in live engines, by the steps of docs/vllm.md: pause, reload, invalidate and clear, resume."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from vllm_caches import EXACT, Pictures, invalidate, options
from vllm_engines import Options, Picture, ServedEngine, started

from benchmarks.parts import Parts

WEIGHTS = "model.safetensors"
QUESTION = "what is it?"
pictures = Pictures(9100)


class Live(NamedTuple):
    """Two engines that share a cache and a model's folder, and one without a cache that has the new weights."""

    folder: Path
    new: Path
    engines: list[ServedEngine]
    right: ServedEngine

    def pause(self) -> None:
        """So that it is the command alone that clears their caches."""
        for engine in self.engines:
            engine.post("/pause?mode=wait&clear_cache=false")

    def reload(self) -> None:
        """The new weights under the old names, into both."""
        shutil.copy(self.new / WEIGHTS, self.folder / "new")
        (self.folder / "new").replace(self.folder / WEIGHTS)
        for engine in self.engines:
            engine.rpc("reload_weights")

    def resume(self) -> None:
        for engine in self.engines:
            engine.post("/resume")


@pytest.fixture(scope="module")
def live(model, tmp_path_factory: pytest.TempPathFactory, cluster: Parts) -> Iterator[Live]:
    folder, new = tmp_path_factory.mktemp("weights") / "model", Path(model("vision", 1))
    shutil.copytree(model("vision"), folder)
    made = options(str(folder), cluster.config, "ec_both", enable_prefix_caching=True)
    engines = [ServedEngine(made, name=f"live-{number}") for number in range(2)]
    right = ServedEngine(Options(str(new), arguments=EXACT), name="new")
    with started(*engines, right):
        yield Live(folder, new, engines, right)


def answers(engine: ServedEngine, *images: Picture) -> tuple[list[list[int]], int]:
    """The tokens for each picture, and how many of them were encoded for it."""
    before = engine.encoded()
    made = [engine.chat(image, QUESTION) for image in images]
    assert [answer.error for answer in made] == [""] * len(made)
    return [answer.tokens for answer in made], engine.encoded() - before


def test_embeddings_of_old_weights_are_not_served_after_the_procedure(live: Live, cluster: Parts) -> None:
    one, other = live.engines
    held, published, new = pictures(), pictures(), pictures()
    right, _ = answers(live.right, held, published, new)
    answers(one, published)
    answers(other, held)

    live.pause()
    live.reload()
    live.resume()
    [stale], encoded = answers(other, published)
    assert encoded == 0
    assert stale != right[1], "resumed too early, an engine loads the old embedding"

    live.pause()
    selector = ["--model", str(live.folder), "--version", version_of(other)]
    invalidate(cluster.config, *selector, engines=live.engines)
    live.resume()
    assert answers(other, held, published) == (right[:2], 2)
    assert answers(one, held, published)[0] == right[:2]
    assert answers(one, new) == (right[2:], 1)
    assert answers(other, new) == (right[2:], 0), "what is encoded from here on is shared again"


def version_of(engine: ServedEngine) -> str:
    """As its log tells it."""
    line = next(line for line in engine.log.read_text().splitlines() if "embeddings here are those of" in line)
    return line.partition(", version ")[2].split()[0]
