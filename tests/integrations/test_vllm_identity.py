from __future__ import annotations

import dataclasses
import enum
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from made_engines import checkpoint, engine, made_tensors

from mmcache.integrations.vllm.identity import EncoderIdentity, _plain
from mmcache.integrations.vllm.settings import ConnectorSettings
from mmcache.key import EmbeddingKey
from mmcache.plain import plain_fault

NAMED = ConnectorSettings(model_version="v1")
"""With it nothing is read."""


def version(settings: ConnectorSettings = NAMED, **changes: Any) -> str:
    return EncoderIdentity.of(engine(**changes), settings).version


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": 512},
        {"limit_per_prompt": {"image": 1}},
        {"parallel_config": SimpleNamespace(tensor_parallel_size=8)},
        {"mm_encoder_tp_mode": "data"},
        {"mm_processor_cache_gb": 0.5},
        {"mm_encoder_only": True},
        {"mm_encoder_attn_backend": "FLASH_ATTN"},
        {"mm_device_do_normalize": False},
        {"mm_processor_kwargs": {}},
        {"mm_processor_kwargs": {"device": "cuda"}},
        {"mm_processor_kwargs": {"images_kwargs": {"device": "cuda"}}},
        {"media_io_kwargs": {"video": {}}},
        {"media_io_kwargs": {"video": {"backend": "torchcodec", "device": "cuda"}}},
        {"ec_transfer_config": SimpleNamespace(ec_role="ec_consumer", mm_encoder_output_widths={"image": 1})},
        {"lora_config": SimpleNamespace(enable_tower_connector_lora=True, target_modules=["qkv"], lora_dtype="auto")},
        {"cache_config": SimpleNamespace(enable_prefix_caching=False)},
        {"revision": "main"},
        {"seed": 1},
        {"hf_overrides": None},
        {"video_pruning_rate": 0.0},
        {"code_revision": "abc"},
    ],
    ids=str,
)
def test_an_encoder_and_a_prefill_engine_of_one_model_agree(changes: dict[str, Any]) -> None:
    assert version(**changes) == version()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"quantization": "fp8"},
        {"quantization_config": {"linear": "fp8"}},
        {"hf_overrides": {"vision_config": {"depth": 2}}},
        {"hf_overrides": checkpoint},
        {"hf_config_path": "org/config"},
        {"model_class_overrides": {"A": "b:C"}},
        {"mm_processor_kwargs": {"max_pixels": 100_000}},
        {"mm_processor_kwargs": {"images_kwargs": {"max_pixels": 100_000}}},
        {"media_io_kwargs": {"video": {"num_frames": 8}}},
        {"media_io_kwargs": {"video": {"video_backend": "nemotron_vl"}}},
        {"video_pruning_rate": 0.5},
        {"mm_encoder_attn_dtype": "fp8"},
        {"trust_remote_code": True, "code_revision": "abc"},
    ],
    ids=str,
)
def test_what_changes_the_output_changes_the_version(changes: dict[str, Any]) -> None:
    assert version(**changes) != version()


def test_every_change_is_a_version_of_its_own() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"mm_processor_kwargs": {"num_frames": 8}},
        {"media_io_kwargs": {"num_frames": {"x": 8}}},
        {"hf_overrides": {"num_frames": 8}},
        {"quantization_config": {"num_frames": 8}},
        {"video_pruning_rate": 0.5},
        {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
        {"video_pruning_rate": 0.25},
    ]
    assert len({version(**change) for change in changes}) == len(changes)


def test_a_kernel_s_name_is_no_quantisation() -> None:
    assert version(quantization="awq_marlin") == version(quantization="awq") == version(quantization="auto_awq")
    assert version(quantization="gptq") != version(quantization="awq")


def test_fp8_scales_count_by_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    (tmp_path / "c").write_text("2")
    a, b, c = (
        version(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(tmp_path / name)) for name in ("a", "b", "c")
    )
    assert a == b != c
    assert version(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(tmp_path / "gone")) not in (a, c)


def test_the_version_is_the_same_in_every_process() -> None:
    program = (
        "from made_engines import engine; from mmcache.integrations.vllm.identity import EncoderIdentity;"
        "from mmcache.integrations.vllm.settings import ConnectorSettings;"
        "print(EncoderIdentity.of(engine(hf_overrides={'a': {1, 2, 3}, 'b': len},"
        " mm_processor_kwargs={'y': 1, 'x': (2.5, None)}), ConnectorSettings(model_version='v1')).version)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {
        version(hf_overrides={"b": len, "a": {3, 2, 1}}, mm_processor_kwargs={"x": (2.5, None), "y": 1}) + "\n"
    }


def test_copies_of_a_checkpoint_have_one_version_wherever_they_are(tmp_path: Path) -> None:
    a, b = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    nothing_set = ConnectorSettings()
    first = EncoderIdentity.of(engine(model=str(a)), nothing_set)
    second = EncoderIdentity.of(engine(model=str(b)), nothing_set)
    assert first.version == second.version
    assert (first.model, second.model) == (str(a), str(b))
    tensors = made_tensors()
    tensors["visual.blocks.0.weight"] += 1.0
    checkpoint(b, tensors)
    assert version(nothing_set, model=str(b)) != first.version


def test_the_processor_s_files_are_part_of_the_version(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "a")
    before = version(ConnectorSettings(), model=str(model))
    (model / "preprocessor_config.json").write_text('{"size": 448}')
    assert version(ConnectorSettings(), model=str(model)) != before


def test_a_configuration_from_another_directory_counts_by_content(tmp_path: Path) -> None:
    model = str(checkpoint(tmp_path / "a"))
    for name, content in (("b", "{}"), ("c", "{}"), ("d", '{"x": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    b, c, d = (version(ConnectorSettings(), model=model, hf_config_path=str(tmp_path / name)) for name in "bcd")
    assert b == c != d


def test_with_a_version_that_is_set_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(checkpoint(tmp_path / "a"))
    monkeypatch.setattr("mmcache.integrations.vllm.identity.read_files", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        version(ConnectorSettings(), model=model)
    assert version(model=model) == version(model=str(tmp_path / "gone")) == version()
    assert version() != version(ConnectorSettings(model_version="v2"))


def test_a_downloaded_checkpoint_is_found_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0" * 40
    home = tmp_path / "models--org--model"
    snapshot = checkpoint(home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    local = version(ConnectorSettings(), model=str(snapshot))
    load_config = SimpleNamespace(load_format="auto", download_dir=str(tmp_path))
    assert version(ConnectorSettings(), model="org/model", load_config=load_config) == local
    assert version(ConnectorSettings(), model="org/model", load_config=load_config, revision=commit) == local
    older = checkpoint(home / "snapshots" / ("1" * 40), made_tensors(layers=1))
    found = version(ConnectorSettings(), model="org/model", load_config=load_config, revision="1" * 40)
    assert found == version(ConnectorSettings(), model=str(older)) != local
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert version(ConnectorSettings(), model="org/model") == local


@pytest.mark.parametrize("model", ["org/unknown", "not/a/repository/at/all", "s3://bucket/model", "\0", "x" * 5000, ""])
def test_weights_that_are_nowhere_go_by_name_and_revision_with_a_warning(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = version(ConnectorSettings(), model=model, revision="a")
    assert "model_version" in caplog.text
    assert first == version(ConnectorSettings(), model=model, revision="a")
    assert first != version(ConnectorSettings(), model=model, revision="b")
    assert first != version(ConnectorSettings(), model=f"{model}2", revision="a")


def test_streamed_weights_go_by_the_name_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    streamed = {"model": str(tmp_path), "model_weights": "s3://bucket/model"}
    identity = EncoderIdentity.of(engine(**streamed), ConnectorSettings())
    assert identity.model == "s3://bucket/model"
    assert identity.parts["weights"].startswith("named:")
    (tmp_path / "config.json").write_text('{"another": 1}')
    assert EncoderIdentity.of(engine(**streamed), ConnectorSettings()).version != identity.version


def test_made_up_weights_are_never_taken_for_the_checkpoint_s(tmp_path: Path) -> None:
    model = str(checkpoint(tmp_path))
    dummy = {"model": model, "load_config": SimpleNamespace(load_format="dummy", download_dir=None)}
    assert version(ConnectorSettings(), **dummy) != version(ConnectorSettings(), model=model)
    assert version(ConnectorSettings(), **dummy) != version(ConnectorSettings(), **dummy, seed=1)


@pytest.mark.parametrize("model", ["/data/My Models/x", "модель", "x" * 257, "a\nb", "\ud800"])
def test_a_name_that_no_key_can_hold_stands_in_it_as_its_digest(model: str) -> None:
    identity = EncoderIdentity.of(engine(model=model), NAMED)
    assert identity.model != model
    EmbeddingKey(model=identity.model, version=identity.version, mm_hash="h")
    assert identity.model == EncoderIdentity.of(engine(model=model), NAMED).model
    assert identity.model != EncoderIdentity.of(engine(model=model + "2"), NAMED).model


def test_a_name_that_is_set_stands_for_the_engine_s() -> None:
    settings = ConnectorSettings(model="ours", model_version="v1")
    assert EncoderIdentity.of(engine(), settings).model == "ours"
    assert EncoderIdentity.of(engine(), NAMED).model == "org/model"


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "local"),
    [(4.0, True, False), (4.0, False, False), (0, True, False), (0.0, False, True)],
)
def test_engines_that_number_their_items_are_told_so(
    cache_gb: float, prefix_caching: bool, local: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = engine(mm_processor_cache_gb=cache_gb, cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching))
    identity = EncoderIdentity.of(config, NAMED)
    assert identity.local_identifiers is local
    identity.advise()
    assert identity.version in caplog.text
    assert ("--mm-processor-cache-gb" in caplog.text) is local


def test_a_text_model_has_an_identity_too() -> None:
    config = engine()
    config.model_config.multimodal_config = None
    config.load_config = None
    assert EncoderIdentity.of(config, NAMED).local_identifiers is False


def test_adapters_reach_the_encoder_only_where_they_are_let() -> None:
    def lora(**options: object) -> SimpleNamespace:
        return SimpleNamespace(
            **{"enable_tower_connector_lora": True, "target_modules": None, "lora_dtype": "auto"} | options
        )

    def made(config: object) -> EncoderIdentity:
        return EncoderIdentity.of(engine(lora_config=config), NAMED)

    assert not made(None).tower_lora
    assert not made(lora(enable_tower_connector_lora=False)).tower_lora
    assert made(lora()).tower_lora
    assert made(lora()).lora_options == made(lora(lora_dtype=torch.bfloat16)).lora_options == ""
    options = {made(lora()).lora_options, made(lora(lora_dtype=torch.float16)).lora_options}
    options |= {made(lora(target_modules=["qkv", "fc1"])).lora_options, made(lora(target_modules=["qkv"])).lora_options}
    assert len(options) == 4
    assert made(lora(target_modules=["b", "a"])).lora_options == made(lora(target_modules=["a", "b"])).lora_options


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Options:
    bits: int
    extra: object = None


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.sampled_from([Colour.RED, torch.float16, Path("/a"), len, Options, object(), torch.device("cpu"), Options(4)]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=20,
)


@given(PLAIN)
@example("\ud800")
@example({"\ud800": 1})
def test_configuration_of_any_kind_becomes_plain_data_without_addresses(value: object) -> None:
    plain = _plain(value)
    assert plain_fault(plain) is None
    assert plain == _plain(value)
    msgspec.msgpack.encode(plain)
    assert " at 0x" not in json.dumps(plain)


def test_configuration_that_holds_itself_ends() -> None:
    value: dict[str, object] = {}
    value["self"] = value
    assert plain_fault(_plain(value)) is None


def test_classes_become_their_fields_and_unset_ones_are_left_out() -> None:
    assert _plain({"o": Options(4)}) == {"o": {"bits": 4}}
    assert _plain([Colour.RED, torch.float16, json.dumps]) == ["RED", "torch.float16", "json:dumps"]
