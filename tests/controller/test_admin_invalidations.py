"""Invalidations by REST: made once, durable before they are told, audited, and followed until they are complete."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from admin_api import OPERATOR, PATIENCE_S, AdminApi, assert_problem
from state_stores import quick_folder

from mmcache.controller.limits import ControllerLimits
from mmcache.controller.state.sqlite import SqliteStateStore


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminApi]:
    with AdminApi(tmp_path_factory.mktemp("admin")) as api:
        yield api


def head(api: AdminApi) -> int:
    return api.client.get("/v1/stats").json()["figures"]["head"]


def test_an_invalidation_is_made_followed_and_listed(api: AdminApi) -> None:
    made = api.invalidate({"model": "m", "lora": None}, reason="new weights", wait=True, timeout=PATIENCE_S)
    assert made.status_code == 201, made.text
    told = made.json()
    assert told["complete"]
    assert (told.pop("engines"), told.pop("entries")) == ([], None)
    assert (told["selector"], told["reason"], told["actor"]) == ({"model": "m", "lora": None}, "new weights", "alice")
    assert abs(told["at"] - time.time()) < 60
    followed = api.client.get(made.headers["location"]).json()
    assert followed["completed_at"] >= told["at"] - 1
    assert {name: followed[name] for name in told if name != "completed_at"} == {
        name: told[name] for name in told if name != "completed_at"
    }
    listed = api.client.get("/v1/invalidations", params={"limit": 1}).json()
    assert listed["invalidations"][0]["number"] == told["number"]


def test_one_that_is_not_complete_says_how_many_it_waits_for(tmp_path: Path) -> None:
    with AdminApi(tmp_path, limits=ControllerLimits(ttl_ms=600_000)) as young:  # sessions of before may live still
        told = young.invalidate({"model": "m"}).json()
        assert not told["complete"]
        assert told["waiting"] == 1
        [listed] = young.client.get("/v1/invalidations").json()["invalidations"]
        assert (listed["complete"], listed["waiting"]) == (False, 1)


def test_pages_are_of_the_newest_first(api: AdminApi) -> None:
    for number in range(5):
        api.invalidate({"version": f"page-{number}"})
    numbers: list[int] = []
    page = api.client.get("/v1/invalidations", params={"limit": 2}).json()
    while True:
        numbers += [one["number"] for one in page["invalidations"]]
        if page["next"] is None:
            break
        page = api.client.get("/v1/invalidations", params={"limit": 2, "before": page["next"]}).json()
    assert numbers == list(range(head(api), 0, -1))


def test_with_the_same_key_it_is_the_same(api: AdminApi) -> None:
    headers = {"Idempotency-Key": "once"}
    first = api.invalidate({"model": "idempotent"}, headers=headers).json()
    again = api.invalidate({"model": "idempotent"}, headers=headers).json()
    assert again["number"] == first["number"] == head(api)
    assert again["idempotency_key"] == "once"
    other = api.invalidate({"model": "another"}, headers=headers)
    assert f"invalidation {first['number']}, for model=idempotent" in assert_problem(other, 409, "idempotency-key")
    assert head(api) == first["number"]
    records = api.client.get("/v1/audit").json()["records"]
    assert [record["detail"]["number"] for record in records].count(first["number"]) == 1


def test_who_did_it_is_recorded_with_it(api: AdminApi) -> None:
    number = api.invalidate({"mm_hash": "\x00" * 1024, "tenant": "t"}, reason="x" * 512).json()["number"]
    [record] = api.client.get("/v1/audit", params={"limit": 1, "action": "invalidate", "actor": "alice"}).json()[
        "records"
    ]
    assert (record["actor"], record["role"], record["outcome"]) == ("alice", "operator", "done")
    assert record["detail"]["number"] == number
    assert record["detail"]["selector"]["tenant"] == "t"
    assert record["detail"]["selector"]["mm_hash"].startswith("blake2b-256:")
    assert OPERATOR not in str(record)
    assert api.client.get("/v1/audit", params={"actor": "nobody"}).json() == {"records": [], "next": None}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"selector": {}}, "selector-empty"),
        ({"selector": {"model": "m"}, "all": True}, "selector-and-all"),
        ({}, "invalid"),
        ([], "invalid"),
        ({"selector": {"model": "m"}, "unknown": 1}, "invalid"),
        ({"selector": {"modell": "m"}}, "invalid"),
        ({"selector": {"model": None}}, "invalid"),
        ({"selector": {"model": ""}}, "invalid"),
        ({"selector": {"model": "a b"}}, "invalid"),
        ({"selector": {"model": "m" * 257}}, "invalid"),
        ({"selector": {"mm_hash": "é" * 600}}, "invalid"),
        ({"selector": {"mm_hash": "\ud800"}}, "invalid"),
        ({"selector": {"model": "m"}, "reason": "\x00"}, "invalid"),
        ({"selector": {"model": "m"}, "reason": "\ud800"}, "invalid"),
        ({"selector": {"model": "m"}, "reason": "x" * 513}, "invalid"),
        ({"selector": {"model": "m"}, "all": "false"}, "invalid"),
        ({"selector": {"model": "m"}, "timeout": 1e9}, "invalid"),
        ({"selector": {"model": "m"}, "timeout": -1}, "invalid"),
    ],
)
def test_what_is_no_invalidation_is_refused(api: AdminApi, body: object, word: str) -> None:
    before = head(api)
    response = api.client.post(
        "/v1/invalidations", content=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    assert_problem(response, 422, word)
    assert head(api) == before


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 100_000, b"NaN"])
def test_what_is_no_json_is_refused(api: AdminApi, content: bytes) -> None:
    response = api.client.post("/v1/invalidations", content=content, headers={"content-type": "application/json"})
    assert response.status_code in (400, 422)
    assert response.headers["content-type"] == "application/problem+json"


def test_everything_must_be_meant(api: AdminApi) -> None:
    told = api.invalidate({}, all=True)
    assert (told.status_code, told.json()["selector"]) == (201, {})


@pytest.mark.parametrize("chunked", [False, True])
def test_a_selector_of_ten_megabytes_is_not_read(api: AdminApi, chunked: bool) -> None:
    body = b'{"selector": {"mm_hash": "' + b"x" * (10 << 20) + b'"}}'
    headers = {"content-type": "application/json"}
    content = iter([body[:1000], body[1000:]]) if chunked else body
    with contextlib.suppress(httpx.WriteError, httpx.ReadError):  # closed while it is sent
        assert_problem(api.client.post("/v1/invalidations", content=content, headers=headers), 413, "too-large")
    assert api.client.get("/healthz").status_code == 200


@pytest.mark.parametrize("number", [10**6, (1 << 63) - 1])
def test_a_number_from_the_future_is_not_there(api: AdminApi, number: int) -> None:
    detail = assert_problem(api.client.get(f"/v1/invalidations/{number}"), 404, "no-such-invalidation")
    assert f"no invalidation {number} yet" in detail
    assert_problem(api.client.get(f"/v1/invalidations/{number}", params={"wait": 5}), 404, "no-such-invalidation")


@pytest.mark.parametrize("number", ["0", "-1", str(1 << 63), "1.5", "x", "%00", "9" * 5000])
def test_what_is_no_number_is_refused(api: AdminApi, number: str) -> None:
    assert_problem(api.client.get(f"/v1/invalidations/{number}"), 422, "invalid")


def test_without_room_it_is_refused_and_nothing_announced() -> None:
    with quick_folder() as folder:
        store = SqliteStateStore.open(folder / "state.db")
        with AdminApi(folder, store=store) as api:
            first = api.invalidate({"model": "before"}).json()["number"]
            (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
            store._connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()
            refused = None
            for number in range(200):
                response = api.invalidate({"mm_hash": f"{number}" + "x" * 900}, reason="r" * 500)
                if response.status_code != 201:
                    refused = response
                    break
                first = response.json()["number"]
            assert refused is not None
            assert "Nothing was written; make room" in assert_problem(refused, 507, "no-room")
            assert head(api) == store.head == first
            records = api.client.get("/v1/audit").json()["records"]
            assert records[0]["detail"]["number"] == first
            assert_problem(api.client.get(f"/v1/invalidations/{first + 1}"), 404, "no-such-invalidation")
            store._connection.execute("PRAGMA max_page_count = 100000").fetchall()
            assert api.invalidate({"model": "after"}).json()["number"] == first + 1


def test_waiting_ends_when_the_controller_does(tmp_path: Path) -> None:
    with AdminApi(tmp_path) as api:
        api.invalidate({"model": "m"})
        api.stop_server()
        assert_problem(api.invalidate({"model": "m"}), 503, "ending")
        assert_problem(api.client.get("/v1/stats"), 503, "ending")
        assert api.client.get("/healthz").status_code == 200
        ready = api.client.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["controller"] == "ok") == (503, False)
