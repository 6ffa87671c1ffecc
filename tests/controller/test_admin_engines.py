"""Engines' own caches by REST: cleared once an invalidation is complete, and of no influence on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from admin_api import PATIENCE_S, AdminApi, assert_problem
from raw_engine import ALL, RawEngine
from raw_http import RawServer

from mmcache.config import EnginesSettings
from mmcache.controller.limits import ControllerLimits
from mmcache.engines import ENDPOINTS
from mmcache.errors import ConfigError

MEANT: dict[str, Any] = {"wait": True, "timeout": PATIENCE_S, "clear_engines": True}


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    with RawEngine() as engine:
        yield engine


def engines(servers: Sequence[RawServer], **settings: Any) -> EnginesSettings:
    return EnginesSettings(urls=tuple(server.url for server in servers), **{"timeout": PATIENCE_S, **settings})


def test_the_engines_of_the_configuration_are_cleared_when_it_is_meant(tmp_path: Path, engine: RawEngine) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("secret")
    with AdminApi(tmp_path, engines=engines([engine], token_file=str(token))) as api:
        made = api.invalidate({"model": "m"}, wait=True, timeout=PATIENCE_S).json()
        assert (made["complete"], made["engines"], engine.asked) == (True, [], [])
        made = api.invalidate({"model": "m"}, **MEANT).json()
        results = [{"endpoint": endpoint, "ok": True, "detail": ""} for endpoint in ENDPOINTS]
        assert made["complete"]
        assert made["engines"] == [{"url": engine.url, "ok": True, "results": results}]
        assert engine.targets == ALL
        assert {asked.headers["authorization"] for asked in engine.asked} == {"Bearer secret"}
        token.chmod(0o644)
        [told] = api.invalidate({"model": "m"}, **MEANT).json()["engines"]
        assert "chmod 600" in told["results"][0]["detail"]
        assert engine.targets == ALL


def test_an_engine_that_fails_changes_nothing_else(tmp_path: Path, engine: RawEngine) -> None:
    with (
        RawServer(lambda *_: None) as silent,
        AdminApi(tmp_path, engines=engines([silent, engine], timeout=1.0)) as api,
    ):
        response = api.invalidate({"model": "m"}, **MEANT)
        assert response.status_code == 201
        assert response.json()["complete"]
        assert [told["ok"] for told in response.json()["engines"]] == [False, True]
        assert api.client.get("/v1/invalidations").json()["invalidations"][0]["complete"]


def test_nothing_is_cleared_before_it_is_complete(tmp_path: Path, engine: RawEngine) -> None:
    limits = ControllerLimits(ttl_ms=3_600_000)  # sessions of before may live still
    with AdminApi(tmp_path, engines=engines([engine]), limits=limits) as api:
        early = api.invalidate({"model": "m"}, **{**MEANT, "timeout": 0}).json()
        assert not early["complete"]
        [told] = early["engines"]
        assert not told["ok"]
        assert all("not complete" in result["detail"] for result in told["results"])
        assert engine.asked == []


def test_with_the_same_key_they_are_cleared_again(tmp_path: Path, engine: RawEngine) -> None:
    with AdminApi(tmp_path, engines=engines([engine])) as api:
        first, again = [api.invalidate({"model": "m"}, **MEANT, headers={"Idempotency-Key": "k"}).json() for _ in "12"]
        assert first["number"] == again["number"]
        assert again["engines"][0]["ok"]
        assert engine.targets == [*ALL, *ALL]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"clear_engines": True}, "clear-needs-wait"),
        ({**MEANT, "dry_run": True}, "clear-needs-wait"),
        (MEANT, "no-engines"),
        ({**MEANT, "clear_engines": "yes"}, "invalid"),
        ({**MEANT, "engines": ["http://127.0.0.1:1"]}, "invalid"),
    ],
)
def test_what_could_clear_nothing_makes_no_invalidation(tmp_path: Path, fields: dict[str, Any], word: str) -> None:
    with AdminApi(tmp_path) as api:
        assert_problem(api.invalidate({"model": "m"}, **fields), 422, word)
        assert api.client.get("/v1/invalidations").json()["invalidations"] == []


def test_a_token_for_engines_that_is_of_no_use_is_found_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"engines\.token_file"),
        AdminApi(tmp_path, engines=EnginesSettings(token_file=str(tmp_path / "nothing"))),
    ):
        pass
