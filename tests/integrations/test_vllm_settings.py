from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcache.config import load
from mmcache.errors import ConfigError
from mmcache.integrations.vllm.settings import ConnectorSettings


def of(**values: object) -> ConnectorSettings:
    return ConnectorSettings.of(values)


def test_nothing_needs_to_be_set() -> None:
    assert ConnectorSettings.of(None) == ConnectorSettings.of({}) == ConnectorSettings()
    settings = ConnectorSettings()
    assert settings.tenant == "default"
    assert settings.staging_bytes == 256 << 20
    assert (settings.fetch_timeout, settings.wait_timeout, settings.connect_timeout) == (2.0, 30.0, 5.0)
    assert settings.model is settings.model_version is settings.config is settings.embedding_width is None


def test_sizes_and_durations_may_carry_units() -> None:
    settings = of(staging_bytes="64MiB", fetch_timeout="500ms", wait_timeout="1min", connect_timeout=3)
    assert settings.staging_bytes == 64 << 20
    assert (settings.fetch_timeout, settings.wait_timeout, settings.connect_timeout) == (0.5, 60.0, 3.0)


@given(st.integers(1 << 20, 1 << 40))
def test_the_staging_memory_is_of_whole_pages_and_no_smaller_than_asked(nbytes: int) -> None:
    staging_bytes = of(staging_bytes=nbytes).staging_bytes
    assert staging_bytes % mmap.PAGESIZE == 0
    assert nbytes <= staging_bytes < nbytes + mmap.PAGESIZE


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("staging_byte", "did you mean staging_bytes?"),
        ("Tenant", "did you mean tenant?"),
        ("fetch-timeout", "did you mean fetch_timeout?"),
        ("store.master", "settings of the store belong in mmcache's configuration file"),
        ("master", "settings of the store belong in mmcache's configuration file"),
        ("controller", "settings of the controller belong in mmcache's configuration file"),
        ("shared_storage_path", "unknown setting shared_storage_path"),
        ("x" * 10_000, "unknown setting xxx"),
    ],
)
def test_an_unknown_setting_is_refused_with_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=r"^ec_connector_extra_config: unknown setting") as caught:
        of(**{name: 1})
    assert meant in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown setting 7"):
        ConnectorSettings.of({7: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("whole", [[], "text", 7, True])
def test_settings_that_are_no_mapping_are_refused(whole: object) -> None:
    with pytest.raises(ConfigError, match=r"^ec_connector_extra_config must be a mapping"):
        ConnectorSettings.of(whole)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("staging_bytes", "64", "must be bytes or a size"),
        ("staging_bytes", 4096, "must be 1,048,576 to"),
        ("staging_bytes", True, "must be a whole number"),
        ("staging_bytes", None, "must be a whole number"),
        ("fetch_timeout", "2", "must be a duration"),
        ("fetch_timeout", 0, "must be 0.001 to 600 seconds"),
        ("fetch_timeout", float("nan"), "must be 0.001 to 600 seconds"),
        ("wait_timeout", -1, "must be 0 to 3600 seconds"),
        ("tenant", "", "must not be empty"),
        ("tenant", "a b", "printable ASCII without spaces"),
        ("tenant", "ä", "printable ASCII without spaces"),
        ("tenant", "x" * 65, "at most 64"),
        ("tenant", "a~b", "must not hold '~'"),
        ("tenant", 7, "must be text"),
        ("model", "a b", "printable ASCII without spaces"),
        ("model_version", "", "must not be empty"),
        ("config", ["/etc/mmcache.yaml"], "must be text, not a list"),
        ("embedding_width", 0, "must be 1 to"),
        ("embedding_width", "3584", "must be a whole number"),
        ("embedding_width", {"image": "wide"}, "for 'image' must be a whole number"),
        ("embedding_width", {7: 64}, "mapping from modality to width"),
    ],
)
def test_an_impossible_value_is_refused_by_its_full_name(name: str, value: object, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of(**{name: value})
    assert str(caught.value).startswith(f"ec_connector_extra_config.{name} ")
    assert fault in str(caught.value)


def test_a_width_is_one_number_or_by_modality() -> None:
    assert of(embedding_width=64).width_of("image") == of(embedding_width=64).width_of("audio") == 64
    by_modality = of(embedding_width={"image": 64, "audio": 32})
    assert (by_modality.width_of("image"), by_modality.width_of("audio"), by_modality.width_of("video")) == (
        64,
        32,
        None,
    )
    assert ConnectorSettings().width_of("image") is None


def test_the_configuration_file_is_the_one_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mmcache.yaml"
    file.write_text("client: {read_timeout: 750ms}\n")
    assert of(config=str(file)).load_config({}).client.read_timeout == 0.75
    assert ConnectorSettings().load_config({"MMCACHE_CONFIG": str(file)}).client.read_timeout == 0.75
    assert ConnectorSettings().load_config({}) == load(environ={})


def test_a_missing_or_wrong_configuration_file_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match=r"ec_connector_extra_config\.config: .*no\.yaml: cannot be read"):
        of(config=missing).load_config({})
    with pytest.raises(ConfigError, match=r"no\.yaml \(MMCACHE_CONFIG\): cannot be read"):
        ConnectorSettings().load_config({"MMCACHE_CONFIG": missing})
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("client:\n  pool: 1\n")
    with pytest.raises(ConfigError, match=r"config: .*wrong\.yaml:2: unknown setting client\.pool"):
        of(config=str(wrong)).load_config({})
