"""Keys from vLLM's own configuration, renderer and request classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from vllm.config import ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.renderers import renderer_from_config

from mmcache.integrations.vllm.adapters import LoraDigests, NoDigest
from mmcache.integrations.vllm.assembly import ItemReport, _measured_in_one_order, _reports_arrive, _staging_name
from mmcache.integrations.vllm.identity import EncoderIdentity, request_key
from mmcache.integrations.vllm.settings import ConnectorSettings
from mmcache.integrations.vllm.widths import expected_widths

SETTINGS = ConnectorSettings()
NUMBERING: dict[str, Any] = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
IMAGE_PROMPT = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")

Engine = Callable[..., VllmConfig]


@pytest.fixture
def engine(model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Engine:
    for name, value in (("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1")):
        monkeypatch.setenv(name, value)

    def make(role: str = "ec_both", **changes: Any) -> VllmConfig:
        arguments = {
            "model": model("vision"),
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 64 << 20,
            "ec_transfer_config": ECTransferConfig(ec_connector="MMCacheECConnector", ec_role=role),
        }
        return EngineArgs(**(arguments | changes)).create_engine_config()

    return make


def identity(config: VllmConfig) -> EncoderIdentity:
    return EncoderIdentity.of(config, SETTINGS)


def test_an_encoder_and_a_prefill_engine_have_one_identity(engine: Engine) -> None:
    both = identity(engine())
    assert both.dtype == "bfloat16"
    assert both.parts["weights"].startswith("files:")
    assert identity(engine("ec_producer", limit_mm_per_prompt={"image": 1})) == both
    assert identity(engine("ec_consumer", max_model_len=512, enable_prefix_caching=False)) == both


def test_what_changes_the_output_changes_the_version(engine: Engine) -> None:
    versions = {
        identity(engine(**changes)).version
        for changes in (
            {},
            {"dtype": "float32"},
            {"load_format": "dummy"},
            {"mm_processor_kwargs": {"max_pixels": 100_000}},
            {"media_io_kwargs": {"video": {"num_frames": 4}}},
            {"hf_overrides": {"another": 1}},
        )
    }
    assert len(versions) == 6


def test_widths_are_the_language_model_s(engine: Engine) -> None:
    config = engine("ec_consumer")
    width = config.model_config.hf_text_config.hidden_size
    assert expected_widths(config, SETTINGS, "image") == expected_widths(config, SETTINGS, "video") == (width,)


def rendered(config: VllmConfig, colour: str, **arguments: Any) -> MultiModalFeatureSpec:
    """An image as vLLM's own renderer names it."""
    renderer = renderer_from_config(config)
    tokens = [renderer.get_tokenizer().convert_tokens_to_ids(token) for token in IMAGE_PROMPT]
    named = {"mm_uuids": None, "mm_processor_kwargs": None} | arguments
    inputs = renderer._process_multimodal(tokens, {"image": [Image.new("RGB", (56, 56), colour)]}, **named)
    mm_hash = inputs["mm_hashes"]["image"][0]
    return MultiModalFeatureSpec(None, "image", mm_hash, PlaceholderRange(offset=1, length=4), mm_hash)


def key_or_reason(config: VllmConfig, feature: MultiModalFeatureSpec, **request: Any) -> Any:
    named = {"lora_digest": None, "cache_salt": None, "tenant": "default"} | request
    key, reason = request_key(identity(config), feature, **named)
    return key or reason


def test_an_engine_that_hashes_its_items_shares_them(engine: Engine) -> None:
    config = engine()
    red, green = rendered(config, "red"), rendered(config, "green")
    assert key_or_reason(config, red).mm_hash == red.mm_hash
    assert key_or_reason(config, red) == key_or_reason(config, rendered(engine(), "red"))
    assert key_or_reason(config, red) != key_or_reason(config, green)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"mm_processor_kwargs": {"max_pixels": 100_000}}, {"media_io_kwargs": {"image": {"image_mode": "L"}}}],
    ids=["plain", "processor arguments", "media arguments"],
)
def test_engines_that_number_their_items_give_different_ones_one_name_and_share_none(
    engine: Engine, arguments: dict[str, Any]
) -> None:
    red, green = (rendered(engine(**NUMBERING), colour, **arguments) for colour in ("red", "green"))
    assert red.identifier == green.identifier  # this is why
    assert key_or_reason(engine(**NUMBERING), red) == "request_local"


def test_and_share_those_that_have_a_uuid(engine: Engine) -> None:
    config = engine(**NUMBERING)
    assert key_or_reason(config, rendered(config, "red", mm_uuids={"image": ["cat"]})).mm_hash == "cat"


def test_and_tell_a_prefill_engine_nothing_of_what_they_numbered(engine: Engine) -> None:
    config = engine("ec_producer", **NUMBERING)
    features = [rendered(config, "red"), rendered(config, "green", mm_uuids={"image": ["cat"]})]
    report = ItemReport(identity(config), PlaceholderMetadataResolver(config.model_config))
    told = report.of(SimpleNamespace(mm_features=features))
    assert told is not None
    assert told.keys() == {"cat"}
    assert told["cat"]["item_indices"] == [1]


def test_an_encoder_alone_has_no_prefix_cache_and_numbers_too(engine: Engine) -> None:
    assert identity(engine("ec_producer", mm_processor_cache_gb=0)).local_identifiers
    assert not identity(engine("ec_consumer", mm_processor_cache_gb=0)).local_identifiers


def test_adapters_are_those_of_vllm_s_requests(engine: Engine, tmp_path: Path) -> None:
    config = engine(enable_lora=True, max_lora_rank=8, enable_tower_connector_lora=True)
    assert identity(config).tower_lora
    assert identity(config).lora_options == ""
    assert not identity(engine(enable_lora=True, max_lora_rank=8)).tower_lora
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    digests = LoraDigests()
    request = LoRARequest("style", 1, str(tmp_path))
    while (digest := digests.digest(request)) is NoDigest.PENDING:
        pass
    digests.close()
    assert isinstance(digest, str)
    feature = MultiModalFeatureSpec(None, "image", "style:cat", PlaceholderRange(offset=0, length=4), "cat")
    key = key_or_reason(config, feature, lora_digest=digest)
    assert (key.lora, key.mm_hash) == (digest, "cat")


@pytest.mark.parametrize("is_moe", [False, True])
def test_engines_that_are_data_parallel_have_staging_memories_of_their_own(engine: Engine, is_moe: bool) -> None:
    config = engine()
    names = set()
    for rank in range(2):  # as `EngineCoreProc.run_engine_core` does
        parallel = config.parallel_config
        parallel.data_parallel_index = rank
        if is_moe:
            parallel.data_parallel_rank = rank
        else:
            parallel.reconfigure_for_independent_dp_rank()
        names.add(_staging_name(config))
    assert len(names) == 2


@pytest.mark.parametrize(
    ("v2", "stages", "runner", "arrive"),
    [
        (False, 1, "generate", True),
        (False, 2, "generate", False),
        (False, 1, "pooling", False),
        (True, 2, "generate", True),
        (True, 1, "pooling", True),
    ],
)
def test_an_engine_whose_runner_drops_what_workers_report_has_no_cache(
    v2: bool, stages: int, runner: str, arrive: bool
) -> None:
    """`execute_model` of V1 returns before it keeps them, on the first of several stages and where it pools."""
    config = SimpleNamespace(
        use_v2_model_runner=v2,
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        model_config=SimpleNamespace(runner_type=runner),
    )
    assert _reports_arrive(config) is arrive


@pytest.mark.parametrize(
    ("size", "role", "started", "seed", "one_order"),
    [
        (2, "ec_both", "spawn", None, False),
        (2, "ec_producer", "spawn", "random", False),
        (2, "ec_both", "spawn", "0", True),
        (2, "ec_consumer", "spawn", None, True),
        (2, "ec_both", "fork", None, True),
        (2, "ec_both", None, None, True),
        (1, "ec_both", "spawn", None, True),
    ],
)
def test_workers_that_may_measure_modalities_in_different_orders_are_found_out(
    monkeypatch: pytest.MonkeyPatch, size: int, role: str, started: str | None, seed: str | None, one_order: bool
) -> None:
    for name, value in (("VLLM_WORKER_MULTIPROC_METHOD", started), ("PYTHONHASHSEED", seed)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=size),
        ec_transfer_config=ECTransferConfig(ec_connector="MMCacheECConnector", ec_role=role),
    )
    assert _measured_in_one_order(config) is one_order
