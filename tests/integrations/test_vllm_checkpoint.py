from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from made_engines import checkpoint, made_tensors
from safetensors.torch import save_file

from mmcache.integrations.vllm import checkpoint as module
from mmcache.integrations.vllm.checkpoint import MAX_SAMPLES, SAMPLE_BYTES, Files, read_files


def weights(path: Path, **options: object) -> str:
    found = read_files(path, **options).weights  # type: ignore[arg-type]
    assert found is not None
    return found


def test_copies_of_a_checkpoint_have_one_digest(tmp_path: Path) -> None:
    first, second = read_files(checkpoint(tmp_path / "a")), read_files(checkpoint(tmp_path / "b"))
    assert first == second
    assert first.weights is not None
    assert set(first.processor) == {"preprocessor_config.json"}


@pytest.mark.parametrize("changed", range(4))
def test_each_tensor_counts(tmp_path: Path, changed: int) -> None:
    tensors = made_tensors(layers=4)
    before = weights(checkpoint(tmp_path / "a", tensors))
    tensors[f"visual.blocks.{changed}.weight"] = tensors[f"visual.blocks.{changed}.weight"] + 1.0
    assert weights(checkpoint(tmp_path / "b", tensors)) != before


def test_a_tensor_smaller_than_a_sample_counts_whole(tmp_path: Path) -> None:
    tensors = made_tensors() | {"visual.scale": torch.tensor([1.0, 2.0])}
    before = weights(checkpoint(tmp_path / "a", tensors))
    assert weights(checkpoint(tmp_path / "b", tensors | {"visual.scale": torch.tensor([1.0, 2.5])})) != before


def test_the_same_bytes_as_other_tensors_are_other_weights(tmp_path: Path) -> None:
    flat = made_tensors(layers=1, elements=4096)
    before = weights(checkpoint(tmp_path / "a", flat))
    shaped = {name: tensor.reshape(64, 64) for name, tensor in flat.items()}
    assert weights(checkpoint(tmp_path / "b", shaped)) != before
    renamed = {name.replace("blocks", "layers"): tensor for name, tensor in flat.items()}
    assert weights(checkpoint(tmp_path / "c", renamed)) != before


@pytest.mark.parametrize("name", ["config.json", "params.json", "hf_quant_config.json"])
def test_the_model_s_configuration_counts_as_its_weights(tmp_path: Path, name: str) -> None:
    before = read_files(checkpoint(tmp_path / "m"))
    (tmp_path / "m" / name).write_text('{"another": true}')
    after = read_files(tmp_path / "m")
    assert after.weights != before.weights
    assert after.config != before.config
    assert after.processor == before.processor


def test_a_configuration_from_elsewhere_stands_in_for_the_checkpoint_s(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((model / "config.json").read_text())
    assert weights(model, config=other) == weights(model)
    (other / "config.json").write_text("{}")
    assert weights(model, config=other) != weights(model)


def test_the_processor_s_files_are_told_apart_from_the_weights(tmp_path: Path) -> None:
    before = read_files(checkpoint(tmp_path / "m"))
    (tmp_path / "m" / "video_preprocessor_config.json").write_text("{}")
    (tmp_path / "m" / "preprocessor_config.json").write_text('{"size": 448}')
    after = read_files(tmp_path / "m")
    assert after.weights == before.weights
    assert set(after.processor) == {"preprocessor_config.json", "video_preprocessor_config.json"}
    assert after.processor["preprocessor_config.json"] != before.processor["preprocessor_config.json"]


def test_programs_count_only_where_they_are_run(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m")
    before = read_files(model)
    (model / "processing_tiny.py").write_text("SIZE = 1")
    assert read_files(model)[:3] == before[:3]
    first = read_files(model, remote_code=True)
    (model / "processing_tiny.py").write_text("SIZE = 2")
    assert first.processor != read_files(model, remote_code=True).processor
    assert set(first.processor) == {"preprocessor_config.json", "processing_tiny.py"}


def test_what_lies_beside_the_weights_changes_nothing(tmp_path: Path) -> None:
    before = read_files(checkpoint(tmp_path / "m"))
    for name in ("README.md", "tokenizer.json", "generation_config.json", "training_args.bin", "optimizer.bin"):
        (tmp_path / "m" / name).write_text("anything")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"not loaded beside safetensors")
    (tmp_path / "m" / "original").mkdir()
    assert read_files(tmp_path / "m") == before


def test_only_files_of_the_index_are_weights(tmp_path: Path) -> None:
    tensors = made_tensors()
    model = checkpoint(tmp_path / "m", tensors)
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")})
    )
    before = read_files(model)
    save_file(made_tensors(layers=1), model / "leftover.safetensors")
    assert read_files(model) == before
    (model / "model.safetensors.index.json").unlink()
    assert read_files(model) != before


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 7}', '{"weight_map": {"a": []}}', "\xff"])
def test_an_index_that_cannot_be_read_is_ignored(tmp_path: Path, index: str) -> None:
    before = read_files(checkpoint(tmp_path / "m"))
    (tmp_path / "m" / "model.safetensors.index.json").write_text(index, encoding="latin-1")
    assert read_files(tmp_path / "m") == before


def test_the_load_format_decides_between_formats_side_by_side(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m")
    (model / "model.bin").write_bytes(b"b" * 10_000)
    (model / "model.pt").write_bytes(b"p" * 10_000)
    save_file(made_tensors(layers=1), model / "consolidated.safetensors")
    digests = {
        form: weights(model, load_format=form) for form in ("auto", "safetensors", "npcache", "pt", "hf", "mistral")
    }
    assert digests["auto"] == digests["mistral"]
    assert digests["safetensors"] == digests["hf"]
    assert len(set(digests.values())) == 4


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
@pytest.mark.parametrize("place", [0, 50_000, 99_999])
def test_files_of_other_formats_are_sampled_from_first_to_last_byte(tmp_path: Path, name: str, place: int) -> None:
    content = bytearray(os.urandom(100_000))
    (tmp_path / name).write_bytes(content)
    before = weights(tmp_path)
    content[place] ^= 1
    (tmp_path / name).write_bytes(content)
    assert weights(tmp_path) != before
    (tmp_path / name).write_bytes(content + b"\0")
    assert weights(tmp_path) != before


def test_a_trainer_s_leftovers_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    before = read_files(tmp_path)
    (tmp_path / "training_args.bin").write_bytes(b"anything")
    assert read_files(tmp_path) == before


def test_a_checkpoint_of_one_file_counts_with_its_projector_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"4" * 9000)
    (tmp_path / "model-q8.gguf").write_bytes(b"8" * 9000)
    before = weights(tmp_path / "model-q4.gguf")
    assert weights(tmp_path / "model-q8.gguf") != before
    (tmp_path / "model-q8.gguf").write_bytes(b"9" * 9000)
    assert weights(tmp_path / "model-q4.gguf") == before
    (tmp_path / "mmproj-f16.gguf").write_bytes(b"p" * 9000)
    assert weights(tmp_path / "model-q4.gguf") != before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 1 << 60) + b"x" * 100,
        struct.pack("<Q", 2) + b"[]" + b"x" * 100,
        struct.pack("<Q", 8) + b"{" * 8 + b"x" * 100,
        struct.pack("<Q", 17) + b'{"a":{"b":[1,2]}}' + b"x" * 100,
        struct.pack("<Q", 31) + b'{"a":{"data_offsets":[0,10000]}}'[:31] + b"x" * 100,
        struct.pack("<Q", 32) + b'{"a":{"data_offsets":[0,10000]}}' + b"x" * 100,
        struct.pack("<Q", 29) + b'{"a":{"data_offsets":[50,1]}}' + b"x" * 100,
        struct.pack("<Q", 30) + b'{"a":{"data_offsets":"broken"}' + b"x" * 100,
    ],
    ids=range(10),
)
def test_a_broken_file_is_sampled_like_one_without_a_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    before = weights(tmp_path)
    assert weights(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(content + b"more")
    assert weights(tmp_path) != before


def test_a_directory_without_weights_has_its_configuration_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_files(tmp_path).weights is None
    assert read_files(tmp_path).config


def test_what_cannot_be_read_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(OSError):
        read_files(tmp_path)


def sparse_checkpoint(path: Path, names: list[str], nbytes: int) -> None:
    """A safetensors file of any size that takes no room on disk."""
    header = json.dumps(
        {
            name: {"dtype": "U8", "shape": [nbytes], "data_offsets": [place * nbytes, (place + 1) * nbytes]}
            for place, name in enumerate(names)
        }
    ).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + len(names) * nbytes)


def change(path: Path, names: list[str], nbytes: int, changed: str) -> None:
    """Write other bytes over the middle of one tensor."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size - (len(names) - names.index(changed)) * nbytes + nbytes // 2)
        file.write(b"changed")


def test_of_a_huge_checkpoint_little_is_read(tmp_path: Path) -> None:
    names = [f"layers.{number}.weight" for number in range(1000)]
    sparse_checkpoint(tmp_path / "model.safetensors", names, 100 << 20)
    assert (tmp_path / "model.safetensors").stat().st_size > 100_000_000_000
    header = 8 + int.from_bytes((tmp_path / "model.safetensors").open("rb").read(8), "little")
    assert read_files(tmp_path).nbytes == header + 1000 * SAMPLE_BYTES


def test_of_very_many_tensors_the_rare_kinds_are_all_read_and_the_common_ones_evenly(tmp_path: Path) -> None:
    experts = [f"layers.{layer}.experts.{expert}.weight" for layer in range(100) for expert in range(128)]
    tower = [f"visual.blocks.{block}.{part}" for block in range(32) for part in ("attn.qkv.weight", "mlp.fc1.weight")]
    names = experts + tower
    file = tmp_path / "model.safetensors"
    sparse_checkpoint(file, names, 1 << 20)
    found = read_files(tmp_path)
    assert found.nbytes < 2 * file.stat().st_size // len(names) * MAX_SAMPLES
    header = 8 + int.from_bytes(file.open("rb").read(8), "little")
    assert found.nbytes == header + MAX_SAMPLES * SAMPLE_BYTES
    digest = found.weights
    for name in (tower[0], tower[-1], tower[31]):
        change(file, names, 1 << 20, name)
        changed = read_files(tmp_path).weights
        assert changed != digest, name
        digest = changed
    for name in experts:  # as an update of the whole model does
        change(file, names, 1 << 20, name)
        break
    assert read_files(tmp_path).weights != digest


def test_the_choice_of_samples_is_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SAMPLES", 10)
    tensors = made_tensors(layers=40, elements=16) | {"visual.norm": torch.ones(4)}
    first: Files = read_files(checkpoint(tmp_path / "a", tensors))
    assert first == read_files(checkpoint(tmp_path / "b", tensors))
    assert weights(checkpoint(tmp_path / "c", tensors | {"visual.norm": torch.zeros(4)})) != first.weights
