from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from made_engines import engine

from mmcache.integrations.vllm.settings import ConnectorSettings
from mmcache.integrations.vllm.widths import expected_widths

NOTHING_SET = ConnectorSettings()


def with_config(**fields: Any) -> SimpleNamespace:
    return engine(hf_config=SimpleNamespace(**fields))


def test_a_plain_encoder_makes_what_the_language_model_takes() -> None:
    assert expected_widths(engine(), NOTHING_SET, "image") == (64,)


def test_vllm_s_own_answer_about_its_input_comes_before_the_hidden_size() -> None:
    config = engine()
    config.model_config.get_inputs_embeds_size = lambda: 96
    assert expected_widths(config, NOTHING_SET, "image") == (96,)


def test_what_is_configured_counts_before_what_was_measured_and_that_before_what_is_derived() -> None:
    config = engine(ec_transfer_config=SimpleNamespace(mm_encoder_output_widths={"image": 256}))
    assert expected_widths(config, NOTHING_SET, "image") == (256,)
    assert expected_widths(config, NOTHING_SET, "audio") == (64,)
    assert expected_widths(config, ConnectorSettings(embedding_width={"image": 32}), "image") == (32,)  # type: ignore[arg-type]


@pytest.mark.parametrize("modality", ["image", "video", "vision_chunk"])
def test_deepstack_levels_lie_side_by_side(modality: str) -> None:
    vision = SimpleNamespace(deepstack_visual_indexes=[8, 16, 24], out_hidden_size=64)
    assert expected_widths(with_config(vision_config=vision), NOTHING_SET, modality) == (256,)
    thinker = SimpleNamespace(vision_config={"deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": 64})
    assert expected_widths(with_config(thinker_config=thinker), NOTHING_SET, modality) == (256,)


def test_audio_beside_a_deepstack_tower_has_no_levels() -> None:
    vision = SimpleNamespace(deepstack_visual_indexes=[8], out_hidden_size=64)
    assert expected_widths(with_config(vision_config=vision), NOTHING_SET, "audio") == (64,)


@pytest.mark.parametrize("indexes", [None, [], ()])
def test_a_tower_without_levels_is_a_plain_one(indexes: object) -> None:
    vision = SimpleNamespace(deepstack_visual_indexes=indexes, out_hidden_size=64)
    assert expected_widths(with_config(vision_config=vision), NOTHING_SET, "image") == (64,)


def test_audio_levels_are_as_many_as_are_injected() -> None:
    audio = SimpleNamespace(deepstack_encoder_layer_indexes=[1, 2, 3])
    assert expected_widths(with_config(audio_config=audio), NOTHING_SET, "audio") == (256,)
    assert expected_widths(with_config(audio_config=audio, deepstack_num_inject_layers=1), NOTHING_SET, "audio") == (
        128,
    )


def test_granite_packs_all_its_levels_and_no_other() -> None:
    config = with_config(deepstack_layer_map=[[-19, 9], [-13, 6]], spatial_target_layers=[12, 15])
    assert expected_widths(config, NOTHING_SET, "image") == (256,)


def test_pruned_videos_may_carry_positions() -> None:
    assert set(expected_widths(engine(video_pruning_rate=0.5), NOTHING_SET, "video")) == {64, 68, 69}
    assert expected_widths(engine(video_pruning_rate=0.0), NOTHING_SET, "video") == (64,)
