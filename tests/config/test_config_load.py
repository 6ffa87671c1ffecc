"""Precedence, and refusal of all that is unknown, ill-typed or out of bounds, with its name and place."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmcache.config import MAX_FILE_BYTES, Settings, StoreSettings, load, without_settings
from mmcache.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "mmcache.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refused(path: Path | None = None, *, environ=(), overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, environ=dict(environ), overrides=dict(overrides))
    return str(caught.value)


def test_without_anything_the_defaults_hold():
    assert load(environ={}) == Settings()


def test_file_then_environment_then_arguments_win(write):
    path = write("client: {read_timeout: 1, publish_timeout: 1, wait_timeout: 1}")
    environ = {"MMCACHE_CLIENT__PUBLISH_TIMEOUT": "2", "MMCACHE_CLIENT__WAIT_TIMEOUT": "2"}
    client = load(path, environ=environ, overrides={"client.wait_timeout": 3.0}).client
    assert (client.read_timeout, client.publish_timeout, client.wait_timeout) == (1.0, 2.0, 3.0)


def test_the_environment_names_the_file_unless_an_argument_does(write, tmp_path):
    named = write("client: {name: by-environment}")
    other = tmp_path / "other.yaml"
    other.write_text("client: {name: by-argument}")
    assert load(environ={"MMCACHE_CONFIG": str(named)}).client.name == "by-environment"
    assert load(other, environ={"MMCACHE_CONFIG": str(named)}).client.name == "by-argument"
    assert load(environ={"MMCACHE_CONFIG": ""}) == Settings()


def test_the_process_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("MMCACHE_CLIENT__IO_THREADS", "7")
    assert load().client.io_threads == 7


def test_variables_that_kubernetes_makes_of_service_names_are_not_settings():
    environ = {
        "MMCACHE_CONTROLLER_PORT": "tcp://10.0.0.7:7710",
        "MMCACHE_STORE_SERVICE_HOST": "10.0.0.8",
    }
    assert load(environ=environ) == Settings()


@pytest.mark.parametrize(
    ("variable", "text", "section", "value"),
    [
        ("MMCACHE_CLIENT__NAME", "123", "client", "123"),
        ("MMCACHE_CLIENT__NAME", "", "client", None),
        ("MMCACHE_STORE__SIDECAR", "", "store", None),
        ("MMCACHE_STORE__DEVICES", "", "store", ""),
        ("MMCACHE_CLIENT__STRICT", "1", "client", True),
        ("MMCACHE_CLIENT__STRICT", "off", "client", False),
        ("MMCACHE_CLIENT__IO_THREADS", "8", "client", 8),
        ("MMCACHE_CLIENT__POOL_BYTES", "1.5GiB", "client", 3 << 29),
        ("MMCACHE_CLIENT__POOL_BYTES", "1048576", "client", 1 << 20),
        ("MMCACHE_CLIENT__READ_TIMEOUT", "250ms", "client", 0.25),
    ],
)
def test_a_value_in_the_environment_means_what_it_would_in_the_file(variable, text, section, value):
    setting = variable.partition("__")[2].lower()
    assert getattr(getattr(load(environ={variable: text}), section), setting) == value


def test_an_unknown_setting_is_refused_with_its_full_name_file_and_line(write):
    path = write("store:\n  attach: auto\nclient:\n  read_timout: 1\n")
    assert refused(path) == (f"{path}:4: unknown setting client.read_timout; did you mean client.read_timeout?")


def test_an_unknown_setting_is_refused_in_the_environment_and_among_arguments():
    message = refused(environ={"MMCACHE_STORE__MASTRE": "a:1"})
    assert "environment variable MMCACHE_STORE__MASTRE: unknown setting store.mastre" in message
    assert "did you mean store.master?" in message
    message = refused(environ={"MMCACHE_CLEINT__READ_TIMEOUT": "1s"})
    assert message == (
        "environment variable MMCACHE_CLEINT__READ_TIMEOUT: unknown setting cleint.read_timeout; "
        "did you mean client.read_timeout?"
    )
    message = refused(overrides={"client.read_timout": 1})
    assert message == "argument: unknown setting client.read_timout; did you mean client.read_timeout?"
    message = refused(overrides={"client.lease": 1})
    assert message == "argument: unknown setting client.lease; did you mean store.lease?"


@pytest.mark.parametrize("name", ["client.foo", "client.overrides", "nonsense", "a.b.c"])
def test_only_what_is_close_is_suggested(name):
    assert refused(overrides={name: 1}) == f"argument: unknown setting {name}"


def test_an_unknown_section_is_refused_and_a_setting_outside_its_section_is_placed(write):
    path = write("\nstroe:\n  master: a:1\n")
    assert refused(path) == f"{path}:2: unknown setting stroe; did you mean store?"
    path = write("pool_bytes: 1GiB")
    assert refused(path) == f"{path}:1: unknown setting pool_bytes; did you mean client.pool_bytes?"


def test_a_setting_given_twice_is_refused_with_both_lines(write):
    path = write("client:\n  strict: true\n  io_threads: 2\n  strict: false\n")
    assert refused(path) == f"{path}:4: client.strict is given twice, first in line 2"
    path = write("client: {strict: true}\nclient: {io_threads: 2}\n")
    assert refused(path) == f"{path}:2: client is given twice, first in line 1"


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("client.name", "123"),
        ("client.name", "no"),
        ("client.name", "''"),
        ("client.name", f"'{'x' * 129}'"),
        ("client.name", '"a\\nb"'),
        ("client.pool_bytes", "0"),
        ("client.pool_bytes", "-1"),
        ("client.pool_bytes", "1.5"),
        ("client.pool_bytes", "'268435456'"),
        ("client.pool_bytes", "64mb"),
        ("client.pool_bytes", "1.0000001MiB"),
        ("client.pool_bytes", "100TiB"),
        ("client.io_threads", "0"),
        ("client.io_threads", "two"),
        ("client.io_threads", "true"),
        ("client.io_threads", "2.0"),
        ("client.read_timeout", "-1"),
        ("client.read_timeout", "0"),
        ("client.read_timeout", ".nan"),
        ("client.read_timeout", ".inf"),
        ("client.read_timeout", "true"),
        ("client.read_timeout", "'2'"),
        ("client.read_timeout", "5 minutes"),
        ("client.read_timeout", "25h"),
        ("client.read_timeout", "null"),
        ("client.read_timeout", "[1]"),
        ("client.read_timeout", "{s: 1}"),
        ("client.read_timeout", "2020-01-01"),
        ("client.read_timeout", "2020-99-99"),
        ("client.strict", "1"),
        ("client.strict", "'true'"),
        ("client.verify", "none"),
        ("store.attach", "Sidecar"),
        ("store.attach", "sidecar"),
        ("store.protocol", "ucx"),
        ("store.master", "127.0.0.1"),
        ("store.master", "127.0.0.1:0"),
        ("store.master", "127.0.0.1:65536"),
        ("store.master", "::1:50051"),
        ("store.master", "50051"),
        ("control.address", "127.0.0.1:7710"),
        ("control.address", "tcp://127.0.0.1:0"),
        ("control.address", "ipc:///tmp/x"),
        ("controller.session_ttl", "10ms"),
        ("controller.max_entries", "0"),
        ("store.lease", "!!python/name:os.system"),
        ("store.lease", "!!int abc"),
    ],
)
def test_an_impossible_value_is_refused_with_its_full_name_and_place(write, setting, text):
    section, _, name = setting.partition(".")
    path = write(f"# a comment\n{section}:\n  {name}: {text}\n")
    message = refused(path)
    assert message.startswith(f"{path}:3: {setting} ")
    assert "\n" not in message


@pytest.mark.parametrize("text", ["[", "a: b", "!!python/name:os.system", "[" * 5000, "x" * 5000, "9" * 5000])
def test_nonsense_in_the_environment_is_refused_with_the_variable(text):
    message = refused(environ={"MMCACHE_CLIENT__IO_THREADS": text})
    assert message.startswith("environment variable MMCACHE_CLIENT__IO_THREADS: client.io_threads ")
    assert len(message) < 300


def test_what_is_no_configuration_file_is_refused(write, tmp_path):
    assert "cannot be read: No such file" in refused(tmp_path / "missing.yaml")
    assert "cannot be read: Is a directory" in refused(tmp_path)
    assert "/nowhere (MMCACHE_CONFIG): cannot be read: No such" in refused(environ={"MMCACHE_CONFIG": "/nowhere"})
    assert ":2: not YAML" in refused(write("client:\n  a: b: c\n"))
    assert ":1: the file must be a mapping" in refused(write("- client\n"))
    assert ":1: client must be a mapping" in refused(write("client: 5\n"))
    assert ":2: the name of a setting must be text" in refused(write("client:\n  ? [a]\n  : 1\n"))
    assert "not UTF-8" in refused(write(b"client: \xff"))
    assert "not YAML" in refused(write(b"client: \x00"))
    assert "not YAML" in refused(write("--- {}\n--- {}\n"))
    assert "nested too deeply" in refused(write("[" * 20_000))
    assert "larger than" in refused(write("#" * (MAX_FILE_BYTES + 1)))


def test_an_empty_file_and_an_empty_section_are_no_settings(write):
    assert load(write(""), environ={}) == Settings()
    assert load(write("client:\nstore: {}\n"), environ={}) == Settings()


def test_sections_made_in_code_are_checked_and_normalised_too():
    assert StoreSettings(lease="2s").lease == 2.0
    assert isinstance(StoreSettings(lease=2).lease, float)
    with pytest.raises(ConfigError, match=r"^store\.master must be HOST:PORT"):
        StoreSettings(master="nowhere")


def test_ipv6_endpoints_are_written_in_brackets(write):
    path = write('store: {master: "[::1]:50051"}\ncontroller: {bind: "tcp://*:0"}\n')
    settings = load(path, environ={})
    assert (settings.store.master, settings.controller.bind) == ("[::1]:50051", "tcp://*:0")


def test_an_environment_without_settings_keeps_all_else():
    ours = {"MMCACHE_CONFIG": "a.yaml", "MMCACHE_STORE__MASTER": "a:1", "MMCACHE_CLIENT__TYPO": "1", "MMCACHE_A__B": ""}
    others = {"PATH": "/bin", "MMCACHE_STORE_PORT": "1"}
    assert without_settings({**ours, **others}) == others
