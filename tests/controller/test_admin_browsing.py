"""The admin API's lists and figures, and the whole of it in a controller's own process with a client of the cache."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from admin_api import OPERATOR, PATIENCE_S, TOKENS, VIEWER, AdminApi, assert_problem, bearer
from serving import Serving, key_of

from mmcache.control.channel import ControlChannel
from mmcache.controller import server
from mmcache.controller.admin.capacity import PARTS
from mmcache.controller.admin.figures import COUNTS, SIZES, to_prometheus
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.server import begin_term, volatile_store

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Serving, httpx.Client]]:
    """A cluster whose controller has the API, and an operator."""
    with Serving(durable=True, admin_tokens=TOKENS) as serving:
        with httpx.Client(base_url=serving.controller.admin, headers=bearer(OPERATOR), timeout=PATIENCE_S) as client:
            yield serving, client


def test_an_entry_is_listed_and_then_invalidated_for_a_client(served: tuple[Serving, httpx.Client]) -> None:
    serving, client = served
    cache = serving.connect()
    keys = [key_of(number, version="rest") for number in range(5)]
    for key in keys:
        assert cache.put(key, torch.ones(4, 8), meta={"grid": [1, 2]}).status == "stored"
    found: list[dict[str, object]] = []
    cursor: dict[str, str] = {}
    while True:
        page = client.get("/v1/entries", params={"version": "rest", "no_lora": True, "limit": 2, **cursor}).json()
        found += page["entries"]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert {entry["key"]["mm_hash"] for entry in found} == {key.mm_hash for key in keys}
    assert all(abs(entry["created"] - time.time()) < 60 for entry in found)
    [one] = [entry for entry in found if entry["key"]["mm_hash"] == keys[0].mm_hash]
    full = client.get(f"/v1/entries/{one['name']}").json()
    assert full["tensors"][0]["shape"] == [4, 8]
    assert full["meta"] == {"grid": [1, 2]}
    body = {"keys": [one["key"], {**one["key"], "mm_hash": "unknown"}]}
    looked_up, unknown = client.post("/v1/lookup", json=body).json()["results"]
    assert unknown is None
    assert looked_up == one

    selector = {"version": "rest"}
    counted = client.post("/v1/invalidations", json={"selector": selector, "dry_run": True}).json()
    assert counted == {"dry_run": True, "matches": 5, "counted_all": True}
    assert cache.get(keys[0]) is not None
    made = client.post("/v1/invalidations", json={"selector": selector, "wait": True}).json()
    assert made["complete"], made
    assert all(cache.get(key) is None for key in keys)
    assert client.get("/v1/entries", params=selector).json() == {"entries": [], "next": None}
    assert_problem(client.get(f"/v1/entries/{one['name']}"), 404, "no-such-entry")
    assert_problem(client.get("/v1/entries/mmc1.x"), 404, "no-such-entry")
    [session] = client.get("/v1/sessions").json()["sessions"]
    assert (session["live"], session["acknowledged"]) == (True, made["number"])


def test_it_is_ready_while_the_store_answers(served: tuple[Serving, httpx.Client]) -> None:
    _, client = served
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)


def test_what_is_wrong_is_told_for_each_list(tmp_path: Path) -> None:
    with AdminApi(tmp_path) as api:
        for query in (
            "cursor=zz",
            "cursor=0",
            "limit=0",
            "limit=1001",
            "created_from=nan",
            "unknown=1",
            "tenant=%C3%A9",
        ):
            assert_problem(api.client.get(f"/v1/entries?{query}"), 422, "invalid")
        assert_problem(api.client.get("/v1/entries?lora=a&no_lora=true"), 422, "invalid")
        assert_problem(api.client.post("/v1/lookup", json={"keys": []}), 422, "invalid")
        assert_problem(api.client.get("/v2"), 404, "not-found")
        assert_problem(api.client.put("/v1/stats"), 405, "method-not-allowed")


def test_sessions_are_listed_on_from_any_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count((1 << 62) - 3)
    monkeypatch.setattr(server, "_random_number", lambda: next(numbers))
    with AdminApi(tmp_path, limits=ControllerLimits()) as api, contextlib.ExitStack() as stack:
        for name in ("first", "second", "third"):
            channel = stack.enter_context(contextlib.closing(ControlChannel(api.control, name=name)))
            channel.start()
            assert channel.wait_fresh(PATIENCE_S) is not None
        query: dict[str, str | int] = {"limit": 1}
        names: list[str] = []
        while (page := api.client.get("/v1/sessions", params=query).json())["next"] is not None:
            names += [one["name"] for one in page["sessions"]]
            query["after"] = page["next"]
        assert names == ["first", "second", "third"]


def test_figures_are_all_there_for_prometheus(tmp_path: Path) -> None:
    core, _ = begin_term(volatile_store())
    states = [f"{unit}_{state}" for state in PARTS for unit in ("entries", "bytes")]
    assert [word for word in core.stats() if word not in states] == [*SIZES, *COUNTS]
    assert set(states) < set(core.stats())
    core.count('odd"word\\')
    text = to_prometheus(core.stats(), core.views.accounts(), calls=1, broken_token_files=2)
    assert 'mmcache_controller_events_total{event="odd\\"word\\\\"} 1\n' in text
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \S+ .+|[a-z_]+(\{(event|state)=".*"\})? \d+(\.\d+)?', line)
    with AdminApi(tmp_path) as api, api.connect(VIEWER) as viewer:
        metrics = viewer.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "mmcache_controller_sessions 0\n" in metrics.text


def run_controller(tmp_path: Path, **controller: object) -> subprocess.CompletedProcess[str]:
    config = tmp_path / "controller.yaml"
    config.write_text(json.dumps({"controller": {"bind": "tcp://127.0.0.1:0", **controller}}))
    command = [sys.executable, "-m", "mmcache.cli", "controller", "-c", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_a_controller_that_others_reach_does_not_start_without_tokens(tmp_path: Path) -> None:
    done = run_controller(tmp_path, admin="0.0.0.0:0")
    assert done.returncode == 2
    assert "mmcache controller: controller.admin is 0.0.0.0:0, which others can reach: give tokens" in done.stderr


def test_an_address_that_is_taken_is_told(tmp_path: Path) -> None:
    with AdminApi(tmp_path) as api:
        admin = api.service.address.removeprefix("http://")
        done = run_controller(tmp_path, admin=admin)
    assert done.returncode == 1
    assert f"mmcache controller: cannot listen at {admin}: Address already in use" in done.stderr


def test_nothing_of_it_is_imported_without_it() -> None:
    program = (
        "import sys, mmcache, mmcache.cli.main, mmcache.controller.server, mmcache.controller.mailbox\n"
        "sys.exit(' '.join(sys.modules.keys() & {'fastapi', 'uvicorn', 'pydantic', 'starlette'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert not done.stderr.strip(), done.stderr
