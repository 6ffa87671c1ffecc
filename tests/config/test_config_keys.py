"""Settings of CURVE: all of an end's or none, and what is no key is refused without being shown."""

from __future__ import annotations

import pytest

from mmcache.config import ControllerSettings, ControlSettings, Settings, load, to_yaml
from mmcache.errors import ConfigError

KEY = "%ne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"


def refused(**environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(environ=environ)
    return str(caught.value)


def test_without_them_there_is_no_curve() -> None:
    settings = Settings()
    assert (settings.control.controller_key, settings.control.secret_key_file) == (None, None)
    assert (settings.controller.secret_key_file, settings.controller.client_keys_file) == (None, None)


def test_a_key_survives_file_and_environment(tmp_path) -> None:
    settings = Settings(control=ControlSettings(controller_key=KEY, secret_key_file="/client.secret"))
    path = tmp_path / "client.yaml"
    path.write_text(to_yaml(settings))
    assert load(path, environ={}) == settings
    path.write_text(f'control: {{controller_key: "{KEY}", secret_key_file: /client.secret}}')
    assert load(path, environ={}) == settings
    environ = {"MMCACHE_CONTROL__CONTROLLER_KEY": KEY, "MMCACHE_CONTROL__SECRET_KEY_FILE": "/client.secret"}
    assert load(environ=environ) == settings


@pytest.mark.parametrize("text", [KEY[1:], KEY + "0", "~" + KEY[1:], "#####" * 8, "\u00e9" * 40, "a" * 5000])
def test_what_is_no_key_is_refused_by_its_name_and_not_shown(text: str) -> None:
    message = refused(MMCACHE_CONTROL__CONTROLLER_KEY=text)
    assert message.startswith("environment variable MMCACHE_CONTROL__CONTROLLER_KEY: control.controller_key must be")
    assert text[:20] not in message


@pytest.mark.parametrize(
    ("given", "value", "missing"),
    [
        ("control.controller_key", KEY, "control.secret_key_file (this client's own)"),
        ("control.secret_key_file", "/x", "control.controller_key (the controller's public key)"),
        ("controller.secret_key_file", "/x", "controller.client_keys_file (the public keys of its clients)"),
        ("controller.client_keys_file", "/x", "controller.secret_key_file (the controller's own)"),
    ],
)
def test_half_of_what_an_end_needs_is_refused_and_the_other_half_named(given: str, value: str, missing: str) -> None:
    variable = f"MMCACHE_{given.replace('.', '__').upper()}"
    message = refused(**{variable: value})
    assert message.startswith(f"environment variable {variable}: {given} is set, but {missing} is not")
    section, _, name = given.partition(".")
    with pytest.raises(ConfigError, match=f"{given} is set"):
        {"control": ControlSettings, "controller": ControllerSettings}[section](**{name: value})
