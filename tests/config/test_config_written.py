"""What `to_yaml` writes reads back as the same settings, and quantities mean what they say."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mmcache.config import ClientSettings, ControllerSettings, Settings, StoreSettings, load, to_yaml
from mmcache.setting_kinds import BadValue, parse_duration, parse_size

printable = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=128)
durations = st.floats(min_value=0.1, max_value=3600.0)


@given(
    name=st.none() | printable,
    devices=printable | st.just(""),
    seconds=st.tuples(durations, durations, durations),
    pool=st.integers(1 << 16, 1 << 44),
)
def test_written_settings_read_back_exactly(tmp_path_factory, name, devices, seconds, pool):
    settings = Settings(
        store=StoreSettings(devices=devices, lease=seconds[0], sidecar="[::1]:1", attach="sidecar"),
        client=ClientSettings(name=name, read_timeout=seconds[1], pool_bytes=pool, strict=True),
        controller=ControllerSettings(session_ttl=seconds[2]),
    )
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_text(to_yaml(settings))
    assert load(path, environ={}) == settings


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0B", 0), ("1KB", 1000), ("1KiB", 1024), ("64MiB", 64 << 20), ("1GB", 10**9), ("1.5 GB", 1_500_000_000)],
)
def test_sizes_count_in_powers_of_1000_and_of_1024(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2s", 2.0), ("1.5 s", 1.5), ("5min", 300), ("1h", 3600)]
)
def test_durations_are_seconds(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "-5s", "1e3s", "5 S", "5mib", "\u0665s", "5s5s", "1.s", "MiB"])
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(BadValue):
        parse_size(text)
    with pytest.raises(BadValue):
        parse_duration(text)
