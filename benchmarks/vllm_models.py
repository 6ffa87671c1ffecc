"""Models small enough for a real vLLM on a CPU, made here: random weights that are the same wherever they are made.

python -m benchmarks.vllm_models KIND FOLDER

vision   a Qwen2-VL of a third of a million weights, whose greedy output depends on its pictures and videos
tower    the same with a vision tower of the size of ViT-B
audio    a Qwen2-Audio, whose output depends on what it hears
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

KINDS = ("vision", "tower", "audio")
HIDDEN = 64
VOCABULARY = 320
"""256 bytes, the special tokens, and room."""
PATCH, MERGE = 14, 2
SPREAD = 0.12
"""Of weights: with the usual 0.02 the output hardly depends on the input."""
COMMON_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
AUDIO_TOKENS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
CHAT = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if 'image' in part or 'image_url' in part or part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif 'video' in part or part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_TOWERS = {
    "vision": {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2},
    "tower": {"depth": 12, "embed_dim": 768, "num_heads": 12, "mlp_ratio": 4},
}


def build(kind: str, folder: Path, seed: int = 0) -> None:
    """Write the model, its tokenizer and its processor into `folder`; other seeds make other weights."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "audio":
        _write_audio(folder, seed)
    else:
        _write_vision(folder, seed, _TOWERS[kind])


def _write_vision(folder: Path, seed: int, tower: dict[str, int]) -> None:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration  # noqa: PLC0415

    token = _write_tokenizer(folder, [*COMMON_TOKENS, *VISION_TOKENS], CHAT)
    text = _text(token) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=tower
        | {"hidden_size": HIDDEN, "in_channels": 3, "patch_size": PATCH}
        | {"spatial_merge_size": MERGE, "temporal_patch_size": 2},
        image_token_id=token["<|image_pad|>"],
        video_token_id=token["<|video_pad|>"],
        vision_start_token_id=token["<|vision_start|>"],
        vision_end_token_id=token["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    _write_weights(folder, Qwen2VLForConditionalGeneration, config, seed, token)
    pixels = {"shortest_edge": 56 * 56, "longest_edge": 448 * 448}
    processor = {
        "processor_class": "Qwen2VLProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
        "min_pixels": pixels["shortest_edge"],
        "max_pixels": pixels["longest_edge"],
        "size": pixels,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    _write_json(folder / "preprocessor_config.json", processor | {"image_processor_type": "Qwen2VLImageProcessor"})
    _write_json(
        folder / "video_preprocessor_config.json", processor | {"video_processor_type": "Qwen2VLVideoProcessor"}
    )


def _write_audio(folder: Path, seed: int) -> None:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration  # noqa: PLC0415

    token = _write_tokenizer(folder, [*COMMON_TOKENS, *AUDIO_TOKENS], "{{ messages[0].content }}")
    config = Qwen2AudioConfig(
        text_config=_text(token) | {"model_type": "qwen2", "rope_theta": 10000.0},
        audio_config={
            "d_model": HIDDEN,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 2 * HIDDEN,
            "num_mel_bins": 80,
            "max_source_positions": 1500,
        },
        audio_token_index=token["<|AUDIO|>"],
    )
    _write_weights(folder, Qwen2AudioForConditionalGeneration, config, seed, token)
    weights = load_file(folder / "model.safetensors")
    # Under the names that published checkpoints have; this release of transformers writes one `model` more.
    renamed = {name.replace(".model.model.", ".model."): tensor for name, tensor in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(
        folder / "preprocessor_config.json",
        {
            "processor_class": "Qwen2AudioProcessor",
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 80,
            "sampling_rate": 16000,
            "hop_length": 160,
            "chunk_length": 30,
            "n_fft": 400,
            "padding_value": 0.0,
            "return_attention_mask": True,
        },
    )


def _text(token: dict[str, int]) -> dict[str, Any]:
    """The language model: two small layers."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "bos_token_id": token["<|endoftext|>"],
        "eos_token_id": token["<|im_end|>"],
        "pad_token_id": token["<|endoftext|>"],
    }


def _write_tokenizer(folder: Path, special: Sequence[str], chat: str) -> dict[str, int]:
    """A token a byte, and the special ones, whose numbers it returns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(special),
        model_max_length=4096,
    )
    wrapped.chat_template = chat
    wrapped.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    # Not the class that this release of transformers writes there: processors take this name, too.
    _write_json(path, json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"})
    return {word: number for word in special if (number := tokenizer.token_to_id(word)) is not None}


def _write_weights(folder: Path, architecture: Any, config: Any, seed: int, token: dict[str, int]) -> None:
    torch.manual_seed(seed)
    model = architecture(config).to(torch.bfloat16)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                # A wide tower would make of all its inputs the same few extremes.
                weights.normal_(0.0, SPREAD * min(1.0, (HIDDEN / weights.shape[-1]) ** 0.5))
    model.save_pretrained(folder, safe_serialization=True)
    ends = {"eos_token_id": token["<|im_end|>"], "pad_token_id": token["<|endoftext|>"], "do_sample": False}
    _write_json(folder / "generation_config.json", ends)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Build one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_models", description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="other seeds make other weights")
    arguments = parser.parse_args()
    build(arguments.kind, arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
