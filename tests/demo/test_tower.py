"""The encoder: deterministic, told apart by its fingerprint, and never loaded in part."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from mmcache.cli.demo.checkpoint import Checkpoint
from mmcache.cli.demo.errors import DemoError
from mmcache.cli.demo.photographs import find_photographs, open_photograph
from mmcache.cli.demo.tower import VisionTower, load_tower
from mmcache.cli.errors import InputError


@pytest.fixture(autouse=True)
def _threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def photograph() -> Image.Image:
    return open_photograph(find_photographs(None).photographs[0].path)


def test_two_towers_of_one_checkpoint_give_the_same_bits(tiny_weights: Path, photograph: Image.Image) -> None:
    first, second = load_tower(tiny_weights), load_tower(tiny_weights)
    embedding = first.encode(photograph)
    assert embedding.shape == (16, 64)
    assert embedding.dtype == torch.float32
    assert torch.equal(embedding, second.encode(photograph))
    assert first.key("a") == second.key("a")
    assert torch.get_num_threads() == 1


def test_an_embedding_depends_on_the_photograph(tiny_weights: Path) -> None:
    tower = load_tower(tiny_weights)
    photographs = [open_photograph(photograph.path) for photograph in find_photographs(None).photographs[:3]]
    a, b, c = (tower.encode(photograph) for photograph in photographs)
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)


def test_it_computes_what_transformers_computes(tiny_weights: Path, photograph: Image.Image) -> None:
    # before transformers 5 the one that works on PIL images had no name of its own
    processor_class = getattr(transformers, "SiglipImageProcessorPil", None) or transformers.SiglipImageProcessor
    processor = processor_class(size={"height": 32, "width": 32})
    pixels = processor(photograph, return_tensors="pt")["pixel_values"]
    model = transformers.SiglipVisionModel.from_pretrained(tiny_weights).eval()
    with torch.inference_mode():
        expected = model(pixel_values=pixels).last_hidden_state[0]
    torch.testing.assert_close(load_tower(tiny_weights).encode(photograph), expected, rtol=1e-4, atol=1e-4)


def test_other_weights_have_other_keys(tiny_weights: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_weights / "model.safetensors")
    name = sorted(weights)[0]
    weights[name] = weights[name] + 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((tiny_weights / "config.json").read_bytes())
    assert load_tower(tmp_path).key("a") != load_tower(tiny_weights).key("a")


def test_a_checkpoint_that_lacks_a_weight_is_refused(tiny_weights: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_weights / "model.safetensors")
    del weights[sorted(weights)[0]]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((tiny_weights / "config.json").read_bytes())
    with pytest.raises(DemoError, match="lacks 1 weight of the tower"):
        load_tower(tmp_path)


def test_the_vision_tower_of_a_whole_clip_model_is_used(tmp_path: Path, photograph: Image.Image) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 50}, vision_config={**sizes, "image_size": 16, "patch_size": 8}
    )
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(tmp_path)
    assert Checkpoint(tmp_path).family == "clip"
    assert VisionTower(Checkpoint(tmp_path)).encode(photograph).shape == (5, 32)  # four patches and the class token


def _without_config(directory: Path) -> None:
    (directory / "model.safetensors").touch()


def _not_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def _language_model(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))


def _only_a_pickle(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "siglip"}))
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_without_config, r"needs a directory with a config\.json"),
        (_not_json, "is not a model's configuration"),
        (_language_model, "model_type 'llama'"),
        (_only_a_pickle, r"holds no \.safetensors"),
    ],
)
def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path, make, message: str) -> None:
    make(tmp_path)
    with pytest.raises(InputError, match=f"--weights.*{message}"):
        Checkpoint(tmp_path)
