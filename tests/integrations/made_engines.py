"""Engines' configurations as vLLM has them, as far as they are looked at, and checkpoints on disk, without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

MODEL = {
    "model": "org/model",
    "model_weights": "",
    "dtype": torch.bfloat16,
    "quantization": None,
    "quantization_config": None,
    "hf_overrides": {},
    "hf_config": SimpleNamespace(),
    "hf_config_path": None,
    "hf_text_config": SimpleNamespace(hidden_size=64),
    "revision": None,
    "code_revision": None,
    "trust_remote_code": False,
    "model_class_overrides": {},
    "seed": 0,
    "max_model_len": 1024,
}
MULTIMODAL = {
    "mm_processor_kwargs": None,
    "media_io_kwargs": {},
    "limit_per_prompt": {},
    "mm_processor_cache_gb": 4.0,
    "mm_encoder_attn_backend": None,
    "mm_encoder_attn_dtype": None,
    "mm_encoder_fp8_scale_path": None,
    "mm_encoder_tp_mode": "weights",
    "mm_device_do_normalize": True,
    "mm_encoder_only": False,
    "video_pruning_rate": None,
    "video_pruning_method": "evs",
}


def engine(**changes: Any) -> SimpleNamespace:
    """A VllmConfig; a change goes where the field of that name is, others are the config's own."""
    model, multimodal = dict(MODEL), dict(MULTIMODAL)
    rest: dict[str, Any] = {
        "lora_config": None,
        "load_config": SimpleNamespace(load_format="auto", download_dir=None),
        "cache_config": SimpleNamespace(enable_prefix_caching=True),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1),
        "ec_transfer_config": SimpleNamespace(ec_role="ec_both", mm_encoder_output_widths={}),
    }
    for name, value in changes.items():
        next(part for part in (model, multimodal, rest) if name in part)[name] = value
    model["multimodal_config"] = SimpleNamespace(**multimodal)
    return SimpleNamespace(model_config=SimpleNamespace(**model), **rest)


def feature(mm_hash: object = "0" * 64, modality: object = "image", identifier: object = "id") -> SimpleNamespace:
    """A MultiModalFeatureSpec."""
    return SimpleNamespace(mm_hash=mm_hash, identifier=identifier, modality=modality)


def checkpoint(directory: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A model's directory: configuration, processor and weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    (directory / "preprocessor_config.json").write_text(json.dumps({"size": 336}))
    save_file(tensors or made_tensors(), directory / "model.safetensors")
    return directory


def made_tensors(layers: int = 4, elements: int = 8192) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {f"visual.blocks.{layer}.weight": torch.rand(elements, generator=generator) for layer in range(layers)}


def adapter(directory: Path, content: bytes = b"weights", name: str = "adapter_model.safetensors") -> Path:
    """A LoRA adapter's directory. Its content is not looked into."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    (directory / name).write_bytes(content)
    return directory
