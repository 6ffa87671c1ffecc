"""What an encoder's output must look like, by the engine's configuration: a loaded embedding of another shape would end
the engine.
"""

from __future__ import annotations

from typing import Any

from mmcache.integrations.vllm.settings import ConnectorSettings

POSITION_CHANNELS = (4, 5)
"""Columns that models with video pruning append for positions: Qwen2.5-VL's, and Qwen3-VL's."""


def expected_widths(vllm_config: Any, settings: ConnectorSettings, modality: str) -> tuple[int, ...]:
    """The second dimensions that an embedding of a modality may have, the likeliest first; at least one.

    What is configured counts, else what vLLM measured (producers encode a dummy item when they start), else the size of
    the language model's input times the levels that an encoder packs side by side (DeepStack).
    """
    if (configured := settings.width_of(modality)) is not None:
        return (configured,)
    measured = getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", None) or {}
    if modality in measured:
        return (int(measured[modality]),)
    model_config = vllm_config.model_config
    width = _derived(model_config, modality)
    multimodal = getattr(model_config, "multimodal_config", None)
    if getattr(multimodal, "video_pruning_rate", None):
        return (*(width + channels for channels in POSITION_CHANNELS), width)
    return (width,)


def _derived(model_config: Any, modality: str) -> int:
    hidden = _input_size(model_config)
    config = getattr(model_config, "hf_config", None)
    config = getattr(config, "thinker_config", None) or config  # Qwen3-Omni's
    if modality == "audio":
        audio = getattr(config, "audio_config", None)
        levels = len(_of(audio, "deepstack_encoder_layer_indexes") or ())
        most = getattr(config, "deepstack_num_inject_layers", None)
        return hidden * (1 + (levels if most is None else min(levels, int(most))))
    vision = getattr(config, "vision_config", None)
    if levels := len(_of(vision, "deepstack_visual_indexes") or ()):
        return int(_of(vision, "out_hidden_size") or hidden) * (1 + levels)
    packed = len(getattr(config, "deepstack_layer_map", None) or ())  # Granite's: no level of its own besides
    packed += len(getattr(config, "spatial_target_layers", None) or ())
    return hidden * (packed or 1)


def _input_size(model_config: Any) -> int:
    """The width of the language model's input embeddings."""
    if callable(of_model := getattr(model_config, "get_inputs_embeds_size", None)):
        return int(of_model())
    return int(model_config.hf_text_config.hidden_size)


def _of(config: Any, name: str) -> Any:
    """A field of a configuration, which may be a mapping."""
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)
