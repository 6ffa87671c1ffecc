"""Settings of what stays in the store: what they mean wherever they stand, and what is refused with its full name."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mmcache.config import ControllerSettings, Settings, load, to_yaml
from mmcache.controller.capacity.rules import CapacityRules
from mmcache.controller.limits import ControllerLimits
from mmcache.errors import ConfigError

WRONG = [
    ("quotas", "tenant=acme 20GiB"),
    ("quotas", "[tenant=acme 0GiB]"),
    ("quotas", "[tenant=acme -1GiB]"),
    ("quotas", "[tenant=acme 101%]"),
    ("quotas", "[tenant=a 60%, tenant=b 41%]"),
    ("quotas", "[tenant=a 10%, tenant=a 1GiB]"),
    ("quotas", "[version=a 10%]"),
    ("quotas", "[7]"),
    ("quotas", "[tenant=a: 10%]"),
    ("quotas", "[[tenant=a 10%]]"),
    ("quotas", "null"),
    ("max_age", "[any 0s]"),
    ("max_age", "[any -1h]"),
    ("max_age", "[any 366d]"),
    ("max_age", "[colour=red 1h]"),
    ("max_age", "['tenant=a,tenant=a 1h']"),
    ("max_age", "[any]"),
    ("max_age", "[3600]"),
    ("high_watermark", "0"),
    ("high_watermark", "-0.1"),
    ("high_watermark", ".nan"),
    ("high_watermark", "1.01"),
    ("high_watermark", "101%"),
    ("high_watermark", "0%"),
    ("high_watermark", "true"),
    ("high_watermark", "high"),
    ("low_watermark", "0"),
    ("low_watermark", "-1"),
    ("low_watermark", ".nan"),
    ("low_watermark", "1.5"),
    ("low_watermark", "0.95"),
    ("high_watermark", "0.8"),
    ("max_bytes", "0"),
    ("max_bytes", "-1"),
    ("max_bytes", "1.5"),
    ("max_bytes", "lots"),
    ("min_embeddings", "-1"),
    ("min_embeddings", "1.5"),
    ("min_embeddings", "true"),
    ("eviction", "random"),
    ("eviction", "null"),
]


@pytest.mark.parametrize(("setting", "text"), WRONG)
def test_what_cannot_be_is_refused_by_its_full_name_in_a_file_and_in_the_environment(
    tmp_path: Path, setting: str, text: str
) -> None:
    path = tmp_path / "mmcache.yaml"
    path.write_text(f"controller:\n  {setting}: {text}\n")
    variable = f"MMCACHE_CONTROLLER__{setting.upper()}"
    for place, given_there in (
        (f"{path}:2", (path, {})),
        (f"environment variable {variable}", (None, {variable: text})),
    ):
        with pytest.raises(ConfigError) as caught:
            load(given_there[0], environ=given_there[1])
        message = str(caught.value)
        assert message.startswith(f"{place}: controller.")
        assert f"controller.{setting}" in message
        assert "\n" not in message


def test_the_low_watermark_is_not_above_the_high_one_wherever_they_come_from() -> None:
    environ = {"MMCACHE_CONTROLLER__LOW_WATERMARK": "70%"}
    overrides = {"controller.high_watermark": 0.6}
    message = r"^.*: controller\.low_watermark is 0\.7, and must not be above controller\.high_watermark, 0\.6$"
    with pytest.raises(ConfigError, match=message):
        load(environ=environ, overrides=overrides)
    assert load(environ=environ, overrides={"controller.high_watermark": 0.7}).controller.low_watermark == 0.7
    with pytest.raises(ValueError, match=r"watermarks cannot be 0\.7 and 0\.6"):
        CapacityRules(low=0.7, high=0.6)
    with pytest.raises(ValueError, match="watermarks cannot be nan"):
        CapacityRules(low=float("nan"))


@pytest.mark.parametrize("limits", [{"min_embeddings": -1}, {"max_bytes": 0}, {"max_bytes": -1}])
def test_limits_that_cannot_be_are_refused_by_name(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(limits))} cannot be"):
        ControllerLimits(**limits)


def test_in_the_environment_they_mean_what_they_would_in_the_file() -> None:
    controller = load(
        environ={
            "MMCACHE_CONTROLLER__QUOTAS": "[tenant=acme 20GiB, model=qwen 30%]",
            "MMCACHE_CONTROLLER__MAX_AGE": "['any 7d', 'tenant=acme,modality=video 1h']",
            "MMCACHE_CONTROLLER__HIGH_WATERMARK": "95%",
            "MMCACHE_CONTROLLER__LOW_WATERMARK": "0.5",
            "MMCACHE_CONTROLLER__MAX_BYTES": "1GiB",
            "MMCACHE_CONTROLLER__MIN_EMBEDDINGS": "16",
            "MMCACHE_CONTROLLER__EVICTION": "lru",
        }
    ).controller
    assert controller == ControllerSettings(
        quotas=("tenant=acme 20GiB", "model=qwen 30%"),
        max_age=("any 7d", "tenant=acme,modality=video 1h"),
        high_watermark=0.95,
        low_watermark=0.5,
        max_bytes=1 << 30,
        min_embeddings=16,
        eviction="lru",
    )


@settings(max_examples=25)
@given(
    shares=st.lists(st.integers(1, 200), max_size=10),
    hours=st.lists(st.integers(1, 8760), max_size=10),
    marks=st.tuples(st.floats(0.001, 1.0), st.floats(0.001, 1.0)),
    most=st.none() | st.integers(1, 1 << 44),
    least=st.integers(0, 1 << 31),
)
def test_what_is_written_reads_back_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    shares: list[int],
    hours: list[int],
    marks: tuple[float, float],
    most: int | None,
    least: int,
) -> None:
    written = Settings(
        controller=ControllerSettings(
            quotas=tuple(f"tenant=t{number} {share / 20:g}%" for number, share in enumerate(shares)),
            max_age=tuple(f"modality=m{number} {age}h" for number, age in enumerate(hours)),
            low_watermark=min(marks),
            high_watermark=max(marks),
            max_bytes=most,
            min_embeddings=least,
            eviction="s3fifo",
        )
    )
    path = tmp_path_factory.getbasetemp() / "capacity.yaml"
    path.write_text(to_yaml(written))
    assert load(path, environ={}) == written
