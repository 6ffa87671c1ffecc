"""Invalidations by producer and time, which are in no key: of each entry that the controller knows of, by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from admin_api import PATIENCE_S, AdminApi, assert_problem

from mmcache import EmbeddingKey
from mmcache.control.channel import CommitEntry, ControlChannel
from mmcache.control.messages import CommitStatus
from mmcache.controller.admin import matching
from mmcache.controller.admin.desk import UnixOffset


@pytest.fixture
def api(tmp_path: Path) -> Iterator[AdminApi]:
    with AdminApi(tmp_path) as api:
        yield api


def publish(api: AdminApi, producer: str, *names: str, **fields: str) -> None:
    channel = ControlChannel(api.control, name=producer)
    channel.start()
    try:
        assert channel.wait_fresh(PATIENCE_S) is not None
        keys = [EmbeddingKey(**{"model": "m", "version": "1", **fields}, mm_hash=name) for name in names]
        entries = [CommitEntry(key, 0, 0, 4096, 1.0, b"info") for key in keys]
        statuses = channel.commit(entries, deadline=time.monotonic() + PATIENCE_S)
        assert set(statuses) == {CommitStatus.STORED}
    finally:
        channel.close()


def known(api: AdminApi) -> set[str]:
    return {entry["key"]["mm_hash"] for entry in api.client.get("/v1/entries").json()["entries"]}


def count(api: AdminApi, **fields: Any) -> int:
    return api.invalidate({}, dry_run=True, **fields).json()["matches"]


def test_what_one_producer_has_published_is_invalidated_and_nothing_else(api: AdminApi) -> None:
    publish(api, "broken", "a", "b", "c")
    publish(api, "sound", "d")
    assert count(api, producer="broken") == 3
    made = api.invalidate({"model": "m"}, producer="broken", reason="a broken GPU", wait=True, timeout=PATIENCE_S)
    told = made.json()
    assert (made.status_code, told["entries"], told["complete"], told["number"]) == (201, 3, True, 3)
    assert known(api) == {"d"}
    [record] = api.client.get("/v1/audit").json()["records"]
    assert (record["detail"]["number"], record["detail"]["entries"]) == (3, 3)
    assert record["detail"]["matching"]["producer"] == "broken"
    nothing = api.invalidate({"model": "m"}, producer="broken")
    assert (nothing.status_code, nothing.json()["matches"]) == (200, 0)


def test_what_was_published_in_a_time_is_invalidated(api: AdminApi) -> None:
    publish(api, "one", "a")
    publish(api, "one", "b")
    first, second = sorted(entry["created"] for entry in api.client.get("/v1/entries").json()["entries"])
    between = (first + second) / 2
    assert second - first > 0.002, "each took a session of its own"
    assert count(api, created_until=0.0) == 0
    assert count(api, created_from=first - 60.0, created_until=second + 60.0) == 2
    assert api.invalidate({}, created_from=between).json()["entries"] == 1
    assert known(api) == {"a"}
    assert api.invalidate({}, created_until=between).json()["entries"] == 1
    assert known(api) == set()


def test_the_time_that_an_answer_tells_of_an_entry_finds_it(api: AdminApi) -> None:
    publish(api, "one", *(f"photo-{number}" for number in range(20)))
    publish(api, "one", "later")
    [later] = api.client.get("/v1/entries", params={"mm_hash": "later"}).json()["entries"]
    for _ in range(20):
        found = api.client.get("/v1/entries", params={"created_from": later["created"]}).json()["entries"]
        assert found == [later]
    assert count(api, created_from=later["created"], created_until=later["created"]) == 1
    assert api.invalidate({}, created_from=later["created"]).json()["entries"] == 1


def test_a_clock_that_is_set_is_followed_and_a_measurement_that_differs_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    offset = UnixOffset()
    first = offset()
    system = time.time
    monkeypatch.setattr(time, "time", lambda: system() + 0.01)
    assert offset() == first
    monkeypatch.setattr(time, "time", lambda: system() + 3600.0)
    assert offset() == pytest.approx(first + 3600.0, abs=1.0)


def test_more_than_are_made_durable_at_once(api: AdminApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_AT_ONCE", 2)
    publish(api, "one", *map(str, range(5)))
    told = api.invalidate({}, producer="one").json()
    assert (told["entries"], told["number"]) == (5, 5)
    assert known(api) == set()


def test_asked_with_the_same_key_it_is_made_once(api: AdminApi) -> None:
    publish(api, "one", "a", "b")
    headers = {"Idempotency-Key": "once"}
    told = api.invalidate({}, producer="one", headers=headers).json()
    again = api.invalidate({}, producer="one", headers=headers)
    assert again.status_code == 201
    assert (again.json()["number"], again.json()["entries"]) == (told["number"], None)
    api.invalidate({"model": "m"}, headers={"Idempotency-Key": "other"})
    other = api.invalidate({}, producer="one", headers={"Idempotency-Key": "other"})
    assert_problem(other, 409, "idempotency-key")


@pytest.mark.parametrize(
    "other", [{"producer": "two"}, {"created_from": 0.0}, {"producer": "one", "selector": {"model": "m"}}]
)
def test_the_key_of_other_entries_is_refused(api: AdminApi, other: dict[str, Any]) -> None:
    publish(api, "one", "a")
    publish(api, "two", "b")
    headers = {"Idempotency-Key": "once"}
    assert api.invalidate({}, producer="one", headers=headers).json()["entries"] == 1
    publish(api, "one", "c")
    api.invalidate({}, producer="one")
    refused = api.invalidate(**{"selector": {}, **other}, headers=headers)
    assert_problem(refused, 409, "idempotency-key")
    assert known(api) == {"b"}
    assert api.invalidate({}, producer="one", headers=headers).json()["number"] == 1


@pytest.mark.parametrize("mm_hash", ["\1" * 1024, "\1" * 40, "\U0001f600" * 256, '"' * 127])
def test_there_is_room_in_the_audit_for_whatever_is_asked_for(api: AdminApi, mm_hash: str) -> None:
    longest = {"tenant": 64, "model": 256, "version": 128, "lora": 128, "modality": 32}
    fields = {name: '"' * length for name, length in longest.items()}
    producer = "\U0001f600" * 128
    publish(api, producer, mm_hash, **fields)
    selector = {**fields, "mm_hash": mm_hash}
    made = api.invalidate(selector, producer=producer, created_from=0.001, created_until=99_999_999_999.999)
    assert made.status_code == 201, made.text
    [record] = api.client.get("/v1/audit").json()["records"]
    told = record["detail"]["selector"]
    assert told == record["detail"]["matching"]["selector"]
    assert {**told, "mm_hash": ""} == {**fields, "mm_hash": ""}
    assert told["mm_hash"] == mm_hash or told["mm_hash"].startswith("blake2b-256:")


def test_too_many_at_once_are_refused(api: AdminApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MAX_FOUND", 2)
    publish(api, "one", "a", "b", "c")
    assert "narrow it" in assert_problem(api.invalidate({}, producer="one"), 422, "too-many-entries")
    assert known(api) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"producer": ""}, "invalid"),
        ({"producer": "p" * 129}, "invalid"),
        ({"producer": "\x00"}, "invalid"),
        ({"producer": 1}, "invalid"),
        ({"created_from": "yesterday"}, "invalid"),
        ({"created_until": -1}, "invalid"),
        ({"producer": "p", "all": True}, "selector-and-all"),
    ],
)
def test_a_wrong_field_is_told(api: AdminApi, body: dict[str, Any], word: str) -> None:
    assert_problem(api.invalidate({}, **body), 422, word)
