"""An adapter of the vision tower whose files change under live engines, by the steps of docs/vllm.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_caches import EXACT, Pictures, invalidate, options
from vllm_engines import Options, Picture, ServedEngine, started

from benchmarks.parts import Parts
from benchmarks.vllm_served import ENVIRONMENT
from mmcache.integrations.vllm.adapters import lora_digest

RANK = 8
MODULES = ("attn.proj", "mlp.fc1", "mlp.fc2")
ARGUMENTS = {
    **EXACT,
    "enable_lora": True,
    "enable_tower_connector_lora": True,
    "max_lora_rank": RANK,
    "worker_extension_cls": "vllm_tower_adapters.Probe",
}
HERE = Path(__file__).parent
RUNTIME_UPDATES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "PYTHONPATH": f"{HERE}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}",
}
pictures = Pictures(9200)


class Adapted(NamedTuple):
    """Two engines that share a cache, and one without, all with adapters in their vision towers."""

    model: Path
    folder: Path
    engines: list[ServedEngine]
    plain: ServedEngine

    def write(self, seed: int) -> None:
        """The adapter's files, under the same names as ever; others with each seed."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, weights in load_file(self.model / "model.safetensors").items():
            module = name.removesuffix(".weight")
            if name.startswith("visual.blocks") and module.endswith(MODULES):
                outputs, inputs = weights.shape
                for part, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                    made = 0.3 * torch.randn(shape, generator=generator)
                    tensors[f"base_model.model.{module}.{part}.weight"] = made
        assert tensors
        self.folder.mkdir(exist_ok=True)
        save_file(tensors, self.folder / "new")
        (self.folder / "new").replace(self.folder / "adapter_model.safetensors")
        about = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["proj", "fc1", "fc2"]}
        (self.folder / "adapter_config.json").write_text(json.dumps(about))

    def load(self, engine: ServedEngine, name: str, **fields: object) -> None:
        engine.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self.folder), **fields})

    def load_again(self, engine: ServedEngine, name: str, way: str) -> None:
        if way == "load_inplace":
            self.load(engine, name, load_inplace=True)
        else:
            engine.post("/v1/unload_lora_adapter", {"lora_name": name})
            self.load(engine, name)

    def pause(self) -> None:
        """So that it is the command alone that clears their caches."""
        for engine in self.engines:
            engine.post("/pause?mode=wait&clear_cache=false")

    def resume(self) -> None:
        for engine in self.engines:
            engine.post("/resume")

    def right(self, seed: int, *images: Picture) -> list[list[int]]:
        """The tokens for each picture: of an engine that holds nothing, with the adapter under a name of its own."""
        self.write(seed)
        name = f"{seed}"
        self.load(self.plain, name)
        return [ask(self.plain, image, name)[0] for image in images]


@pytest.fixture(scope="module")
def adapted(model, tmp_path_factory: pytest.TempPathFactory, cluster: Parts) -> Iterator[Adapted]:
    path = model("vision")
    made = options(
        path, cluster.config, "ec_both", environment=RUNTIME_UPDATES, **ARGUMENTS, enable_prefix_caching=True
    )
    engines = [ServedEngine(made, name=f"adapted-{number}") for number in range(2)]
    plain = ServedEngine(Options(path, arguments=ARGUMENTS, environment=RUNTIME_UPDATES), name="plain")
    with started(*engines, plain):
        yield Adapted(Path(path), tmp_path_factory.mktemp("adapters") / "style", engines, plain)


def ask(engine: ServedEngine, picture: Picture, name: str) -> tuple[list[int], int]:
    """The tokens for a picture with an adapter, and how many items were encoded for it."""
    before = engine.encoded()
    answer = engine.chat(picture, "what is it?", model=name)
    assert not answer.error
    return answer.tokens, engine.encoded() - before


@pytest.mark.parametrize(("way", "old", "new"), [("unload_and_load", 1, 2), ("load_inplace", 3, 4)])
def test_files_that_changed_are_other_keys_and_what_engines_hold_is_cleared(
    adapted: Adapted, cluster: Parts, way: str, old: int, new: int
) -> None:
    one, other = adapted.engines
    held, published, unseen = pictures(), pictures(), pictures()
    after = adapted.right(new, held, published, unseen)
    before = adapted.right(old, held, published)
    digest = lora_digest(adapted.folder)
    for engine in adapted.engines:
        adapted.load(engine, way)
    assert ask(one, held, way) == (before[0], 1)
    assert ask(one, published, way) == (before[1], 1)
    assert ask(other, held, way) == (before[0], 0)

    adapted.pause()
    adapted.write(new)
    for engine in adapted.engines:
        adapted.load_again(engine, way, way)
    adapted.resume()
    assert ask(other, published, way) == (after[1], 1), "under another key, although nothing was invalidated"
    assert ask(one, held, way) == (before[0], 0), "vLLM holds it by the adapter's name, which is the same"
    assert before[0] != after[0]

    adapted.pause()
    invalidate(cluster.config, "--lora", digest, engines=adapted.engines)
    adapted.resume()
    assert ask(one, held, way) == (after[0], 1)
    assert ask(other, held, way)[0] == after[0]
    assert ask(one, published, way)[0] == after[1]
    assert ask(one, unseen, way) == (after[2], 1)
    assert ask(other, unseen, way) == (after[2], 0), "what is encoded from here on is shared again"
