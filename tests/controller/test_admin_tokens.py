"""Who may use the admin API: tokens of a file or the environment, read again as they change."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from admin_api import EXPIRED, OPERATOR, TOKENS, VIEWER, AdminApi, assert_problem, bearer

from mmcache.config import ControllerSettings, Settings
from mmcache.controller.admin.service import AdminService
from mmcache.controller.admin.tokens import VARIABLE, Role, TokenRefused, Tokens, parse
from mmcache.controller.mailbox import Mailbox
from mmcache.controller.server import volatile_store
from mmcache.errors import ConfigError

LONG = "t" * 20


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminApi]:
    with AdminApi(tmp_path_factory.mktemp("admin")) as api:
        yield api


def test_a_viewer_looks_and_an_operator_invalidates(api: AdminApi) -> None:
    with api.connect(VIEWER) as viewer:
        for path in ("/v1/stats", "/metrics", "/v1/invalidations", "/v1/sessions", "/v1/entries", "/v1/audit"):
            assert viewer.get(path).status_code == 200
        key = {"model": "m", "version": "1", "mm_hash": "h"}
        assert viewer.post("/v1/lookup", json={"keys": [key]}).json() == {"results": [None]}
        refused = viewer.post("/v1/invalidations", json={"selector": {"model": "m"}})
    assert assert_problem(refused, 403, "role") == "grafana is viewer; this needs operator"
    assert api.invalidate({"model": "m"}).status_code == 201


@pytest.mark.parametrize(
    ("header", "detail"),
    [
        (None, "give a token"),
        ("Bearer", "give a token"),
        (f"Basic {OPERATOR}", "give a token"),
        ("Bearer wrong", "not known"),
        (f"Bearer {OPERATOR}x", "not known"),
        (f"Bearer {OPERATOR[:-1]}", "not known"),
        ("Bearer " + "x" * 10_000, "not known"),
        (b"Bearer \xff\xfe\x80", "not known"),
        (f"Bearer {EXPIRED}", "has expired"),
    ],
)
def test_wrong_and_expired_tokens_are_refused(api: AdminApi, header: str | bytes | None, detail: str) -> None:
    with api.connect(None) as stranger:
        headers = {} if header is None else {"Authorization": header}
        for path in ("/v1/stats", "/metrics", "/v1/entries/x", "/v1/invalidations/999"):
            response = stranger.get(path, headers=headers)
            assert detail in assert_problem(response, 401, "token")
            assert response.headers["www-authenticate"].startswith("Bearer")


def test_health_needs_no_token(api: AdminApi) -> None:
    with api.connect(None) as stranger:
        assert stranger.get("/healthz").json() == {"status": "alive"}
        ready = stranger.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["controller"]) == (503, "ok"), "there is no store"


def test_a_changed_file_counts_within_seconds_and_a_broken_one_does_not(api: AdminApi) -> None:
    new = "new-" + "n" * 20

    def asked(token: str) -> int:
        return api.client.get("/v1/stats", headers=bearer(token)).status_code

    def wait_for(token: str, status: int) -> None:
        until = time.monotonic() + 10
        while asked(token) != status:
            assert time.monotonic() < until
            time.sleep(0.05)

    assert asked(new) == 401
    api.write_tokens(f"- {{name: new, role: viewer, token: {new}}}")
    wait_for(new, 200)
    assert asked(OPERATOR) == 401
    for broken in ("{", "- {name: x, role: root, token: " + LONG + "}"):
        api.write_tokens(broken)
        time.sleep(1.1)
        assert asked(new) == 200, "what was read last goes on"
    api.tokens.unlink()
    time.sleep(1.1)
    assert asked(new) == 200
    counted = api.client.get("/metrics", headers=bearer(new)).text
    assert "mmcache_controller_admin_token_file_broken_total 3\n" in counted
    replacement = api.tokens.with_suffix(".new")
    replacement.touch(mode=0o600)
    replacement.write_text(TOKENS)
    replacement.rename(api.tokens)
    wait_for(OPERATOR, 200)
    assert asked(new) == 401


def test_tokens_of_the_environment_and_of_the_file_both_count(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text(TOKENS)
    digest = hashlib.sha256(LONG.encode()).hexdigest()
    tokens = Tokens(file, {VARIABLE: f'[{{"name": "env", "role": "viewer", "sha256": "{digest}"}}]'})
    assert tokens.wanted
    assert tokens.actor_of(LONG) == ("env", Role.VIEWER)
    assert tokens.actor_of(OPERATOR) == ("alice", Role.OPERATOR)
    with pytest.raises(TokenRefused):
        tokens.actor_of(digest)
    assert Tokens(None, {VARIABLE: ""}).wanted, "an empty list lets nobody in"
    assert not Tokens(None, {}).wanted


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("{", "line 1: not YAML"),
        ("a: 1", "must be a list"),
        ("[1]", "token 1: must be a mapping"),
        (f"[{{name: x, role: viewer, token: {LONG}, more: 1}}]", "'more' is none of expires, name"),
        (f"[{{name: x, role: viewer, 1: 1, token: {LONG}}}]", "'1' is none of"),
        (f"[{{role: viewer, token: {LONG}}}]", "name must be"),
        (f'[{{name: "\\n", role: viewer, token: {LONG}}}]', "name must be"),
        (f"[{{name: x, role: admin, token: {LONG}}}]", "role must be viewer or operator"),
        (f"[{{name: x, role: [viewer], token: {LONG}}}]", "role must be viewer or operator"),
        ("[{name: x, role: viewer}]", "either token or sha256"),
        (f"[{{name: x, role: viewer, token: {LONG}, sha256: {'0' * 64}}}]", "either token or sha256"),
        ("[{name: x, role: viewer, token: short}]", "openssl rand -hex 32"),
        ("[{name: x, role: viewer, token: 123456789012345678901}]", "openssl rand -hex 32"),
        (f'[{{name: x, role: viewer, token: "{LONG} é"}}]', "openssl rand -hex 32"),
        ("[{name: x, role: viewer, sha256: ABC}]", "64 lower-case hex digits"),
        (f"[{{name: x, role: viewer, token: {LONG}, expires: soon}}]", "expires must be a time"),
        (f"[{{name: x, role: viewer, token: {LONG}, expires: 5}}]", "expires must be a time"),
        (f"[{{name: x, role: viewer, token: {LONG}}}, {{name: y, role: viewer, token: {LONG}}}]", "given twice"),
    ],
)
def test_a_wrong_list_says_where_and_never_the_token(text: str, detail: str) -> None:
    with pytest.raises(ConfigError, match="somewhere") as caught:
        parse(text, "somewhere")
    assert detail in str(caught.value)
    assert LONG not in str(caught.value)


@pytest.mark.parametrize(
    "expires", ["2030-01-01", "2030-01-01T00:00:00Z", '"2030-01-01T00:00:00Z"', "2030-01-01 00:00:00"]
)
def test_times_are_in_utc(expires: str) -> None:
    [token] = parse(f"[{{name: x, role: viewer, token: {LONG}, expires: {expires}}}]", "somewhere")
    assert token.expires == 1893456000


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    os.chmod(file, 0o640)
    with pytest.raises(ConfigError, match=f"chmod 600 {file}"):
        Tokens(file, {})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Tokens(tmp_path / "none", {})


def test_without_tokens_it_does_not_start_where_others_reach_it() -> None:
    def start(**controller: object) -> None:
        settings = Settings(controller=ControllerSettings(admin="0.0.0.0:0", **controller))
        mailbox = Mailbox()
        AdminService(settings, mailbox, volatile_store(), environ={}).close()
        mailbox.close()

    with pytest.raises(ConfigError, match="which others can reach: give tokens"):
        start()
    start(admin_open=True)


def test_without_tokens_a_page_of_another_name_is_refused(tmp_path: Path) -> None:
    with AdminApi(tmp_path, tokens=None) as api:
        assert api.client.get("/v1/stats").status_code == 200
        assert api.client.get("/v1/stats", headers={"Host": "localhost:1"}).status_code == 200
        assert_problem(api.client.get("/v1/stats", headers={"Host": "evil.example"}), 403, "foreign-host")
        assert api.invalidate({"model": "m"}).json()["actor"] == "anybody"
        plain = {"content-type": "text/plain"}  # which a browser sends anywhere without asking
        response = api.client.post("/v1/invalidations", content=b'{"selector": {"model": "m"}}', headers=plain)
        assert "Content-Type" in assert_problem(response, 422, "invalid")
