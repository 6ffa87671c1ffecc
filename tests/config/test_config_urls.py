"""URLs in settings: one form, ASCII, without credentials; and lists of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmcache.config import EnginesSettings, Settings, load, to_yaml
from mmcache.errors import ConfigError
from mmcache.setting_kinds import BadValue, Url, Urls


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://engine-1.example:443/", "https://engine-1.example:443"),
        ("http://[::1]:8000/gateway/e1/", "http://[::1]:8000/gateway/e1"),
        ("http://engine", "http://engine"),
    ],
)
def test_urls_are_taken(text: str, url: str) -> None:
    assert Url().check(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:8000",
        "ftp://a:1",
        "file:///etc/passwd",
        "HTTP://a:1",
        "http://",
        "http://:8000",
        "http://a:0",
        "http://a:65536",
        "http://a:٨٠",
        "http://a:1?x=1",
        "http://a:1#x",
        "http://a:1\\b",
        "http://a:1/b c",
        "http://a:1/%0d%0a",
        "http://a:1\r\nX: y",
        "http://а.example:1",  # noqa: RUF001 (Cyrillic)
        "http://ａ:1",  # noqa: RUF001 (full width)
        "http://a\u202e:1",
        "http://a\u3002example:1",
        "http://[::1:1",
        "http://[:::]:1",
        "http://[1.2.3.4]:1",
        "http://[fe80::1%eth0]:1",
        "http://-a:1",
        "http://" + "a" * 300,
        8000,
        None,
        ["http://a:1"],
    ],
)
def test_what_is_no_url_is_refused(text: object) -> None:
    with pytest.raises(BadValue):
        Url().check(text)


def test_credentials_are_refused_and_not_shown() -> None:
    with pytest.raises(BadValue, match="credentials") as caught:
        Url().check("http://user:hunter2@a:1")
    assert "hunter2" not in str(caught.value)


def test_engines_come_from_the_file_and_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "mmcache.yaml"
    path.write_text("engines:\n  urls:\n  - http://a:1/\n  - http://b:2\n  - http://a:1\n  timeout: 5s\n")
    assert load(path, environ={}).engines == EnginesSettings(urls=("http://a:1", "http://b:2"), timeout=5.0)
    environ = {"MMCACHE_ENGINES__URLS": "[http://c:3, 'http://[::1]:4']"}
    assert load(path, environ=environ).engines.urls == ("http://c:3", "http://[::1]:4")
    settings = Settings(engines=EnginesSettings(urls=("http://a:1", "http://b:2")))
    path.write_text(to_yaml(settings))
    assert load(path, environ={}) == settings


@pytest.mark.parametrize(
    "value", ["http://a:1", "{url: http://a:1}", "[[http://a:1]]", "[{url: http://a:1}]", "[8000]", "[null]", "null"]
)
def test_what_is_no_list_of_urls_is_refused_with_its_place(tmp_path: Path, value: str) -> None:
    path = tmp_path / "mmcache.yaml"
    path.write_text(f"engines:\n  urls: {value}\n")
    with pytest.raises(ConfigError, match=r"mmcache\.yaml:2: engines\.urls"):
        load(path, environ={})


def test_lists_are_bounded() -> None:
    assert len(Urls(most=3).check([f"http://a:{port}" for port in (1, 2, 3)])) == 3  # type: ignore[arg-type]
    with pytest.raises(BadValue, match="at most 3"):
        Urls(most=3).check([f"http://a:{port}" for port in (1, 2, 3, 4)])


def test_a_list_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mmcache.yaml"
    path.write_text("client: {read_timeout: [1]}")
    with pytest.raises(ConfigError, match="not a list"):
        load(path, environ={})
