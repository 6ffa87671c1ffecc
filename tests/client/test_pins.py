"""Pins through a real controller and a real store that is full: what is kept, what is refused, what a restart keeps."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of, name_of, store_of

from mmcache import AsyncMMCache, EmbeddingKey, InvalidKey, MMCache, PinRefused, Selector
from mmcache.control.messages import MAX_BATCH
from mmcache.errors import ControllerUnavailable

LONG = 120.0
LEASE_S = 1.0
SEGMENT = 32 << 20
VALUES = 1 << 18
"""Floats of an entry: a megabyte."""
OPERATOR, VIEWER = "operator-" + "o" * 20, "viewer-" + "v" * 20
TOKENS = f"""
- {{name: alice, role: operator, token: {OPERATOR}}}
- {{name: grafana, role: viewer, token: {VIEWER}}}
"""


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """A small store with a short lease, and a controller that knows where its metrics are."""
    serving = Serving(
        segment_bytes=SEGMENT,
        lease_ms=round(LEASE_S * 1000),
        durable=True,
        admin_tokens=TOKENS,
        controller_store={"lease": LEASE_S},
    )
    with serving:
        serving.controller.kill()
        config = json.loads(serving.controller._config.read_text())
        config["store"]["metrics"] = serving.store.metrics
        serving.controller._config.write_text(json.dumps(config))
        serving.controller.start()
        yield serving


@pytest.fixture
def cache(serving: Serving) -> Iterator[MMCache]:
    with MMCache.connect(serving.config) as cache:
        yield cache


def put(cache: MMCache, keys: list[EmbeddingKey]) -> list[str]:
    return [cache.put(key, torch.full((VALUES,), float(place))).status for place, key in enumerate(keys)]


def put_each(cache: MMCache, keys: list[EmbeddingKey]) -> None:
    """Also into a store that is full: a put may be refused while it evicts."""
    for key in keys:
        wait_until(lambda key=key: put(cache, [key]) != ["dropped"], timeout=LONG, what="a publication")  # type: ignore[misc]


def figures(cache: MMCache) -> dict[str, int]:
    """The controller's, once there is a session: after a restart the client may not have noticed that yet."""
    told: list[dict[str, int]] = []

    def asked() -> bool:
        with contextlib.suppress(ControllerUnavailable):
            told.append(cache._channel.inspect(deadline=time.monotonic() + LONG))
        return bool(told)

    wait_until(asked, timeout=LONG, what="the controller's figures")
    return told[0]


def names(serving: Serving) -> set[str]:
    """All that the store's master knows; to ask it takes no lease."""
    with contextlib.closing(http.client.HTTPConnection(serving.store.metrics, timeout=20)) as connection:
        connection.request("GET", "/get_all_keys")
        return set(connection.getresponse().read().decode().split())


def pin(cache: MMCache, what: Any, ttl: float = 3600.0) -> Any:
    """Once the capacity is known, which takes seconds after a start."""
    pinned: list[Any] = []

    def done() -> bool:
        with contextlib.suppress(PinRefused):
            pinned.append(cache.pin(what, ttl, reason="a test"))
        return bool(pinned)

    wait_until(done, timeout=LONG, what="the capacity")
    return pinned[0]


def api(serving: Serving, token: str = OPERATOR) -> httpx.Client:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=serving.controller.admin, headers=headers, timeout=LONG, trust_env=False)


def test_what_is_pinned_outlives_the_stores_eviction_and_a_restart(serving: Serving, cache: MMCache) -> None:
    kept = [key_of(f"kept-{number}") for number in range(3)]
    others = [key_of(f"other-{number}") for number in range(3)]
    assert put(cache, kept + others) == ["stored"] * 6
    pinned = pin(cache, kept)
    assert (len(pinned.ids), pinned.entries) == (3, 3)
    assert pinned.nbytes > 3 * 4 * VALUES
    assert abs(pinned.until - time.time() - 3600) < LONG
    pinned_names = {name_of(cache, key) for key in kept}
    evicted = {name_of(cache, key) for key in others}
    serving.controller.kill()
    serving.controller.start()
    wait_until(lambda: cache._channel.fresh() is not None, timeout=LONG, what="a session")
    wait_until(lambda: figures(cache)["entries_pinned"] == 3, timeout=LONG, what="the pins of before")
    fillers = iter(range(10_000))

    def full_of_others() -> bool:
        put(cache, [key_of(f"filler-{next(fillers)}")])
        there = names(serving)
        assert pinned_names <= there, "a pinned entry was evicted"
        return evicted.isdisjoint(there)

    wait_until(full_of_others, timeout=LONG, what="the eviction of what was not pinned")
    begun = figures(cache)["pin.renewed"]
    for _ in range(2 * SEGMENT // (4 * VALUES)):  # everything else is evicted twice over
        full_of_others()
    wait_until(lambda: figures(cache)["pin.renewed"] > begun, timeout=LONG, what="a renewal")
    assert figures(cache).get("pin.lost", 0) == 0
    assert all(embedding is not None for embedding in cache.get_many(kept, timeout=LONG))
    assert cache.unpin(pinned) == 3
    wait_until(lambda: figures(cache)["entries_pinned"] == 0, timeout=LONG, what="the sweep")

    def gone() -> bool:
        put(cache, [key_of(f"filler-{next(fillers)}")])
        return pinned_names.isdisjoint(names(serving))

    wait_until(gone, timeout=LONG, what="the eviction of what is pinned no more")


def test_what_the_store_lost_all_the_same_is_forgotten(serving: Serving, cache: MMCache) -> None:
    key = key_of("lost")
    put_each(cache, [key])
    pin(cache, Selector.exactly(key))
    before = figures(cache).get("pin.lost", 0)

    def removed() -> bool:  # which needs a moment between two leases
        store_of(cache).remove([name_of(cache, key)], deadline=time.monotonic() + LONG)
        return name_of(cache, key) not in names(serving)

    serving.controller.process.send_signal(signal.SIGSTOP)  # no lease is renewed meanwhile
    try:
        wait_until(removed, timeout=LONG, what="the end of the lease")
    finally:
        serving.controller.process.send_signal(signal.SIGCONT)
    wait_until(lambda: figures(cache).get("pin.lost", 0) == before + 1, timeout=LONG, what="the loss to be seen")
    assert cache.lookup([key], timeout=LONG) == [None]
    assert cache.unpin(Selector.exactly(key)) == 1
    assert cache.unpin(Selector.exactly(key)) == 0


def test_more_than_a_share_is_refused_with_the_figures(serving: Serving, cache: MMCache) -> None:
    put_each(cache, [key_of(f"share-{number}", version="share") for number in range(10)])
    wide = Selector(version="share")
    pin(cache, Selector(mm_hash="nothing"), ttl=1.0)
    with pytest.raises(PinRefused, match=rf"At most {SEGMENT // 4:,} may be, 0.25 of the store's {SEGMENT:,}"):
        cache.pin(wide, 60.0)
    assert figures(cache)["bytes_pinned"] <= SEGMENT // 4


@pytest.mark.parametrize(
    ("what", "ttl", "says"),
    [
        (Selector(), 60.0, "to pin all is to pin nothing"),
        ([], 60.0, "keys: 0 were given"),
        ([key_of(number) for number in range(MAX_BATCH + 1)], 60.0, "keys: 4,097 were given"),
        ([key_of("x" * 1000 + f"{number}") for number in range(MAX_BATCH)], 60.0, "in parts"),
        (["mm_hash"], 60.0, "a sequence of such keys"),
        ("mm_hash", 60.0, "a sequence of such keys"),
        (None, 60.0, "a sequence of such keys"),
        (Selector(model="m"), 0.0, "ttl must be seconds above 0"),
        (Selector(model="m"), -1.0, "ttl must be"),
        (Selector(model="m"), math.nan, "ttl must be"),
        (Selector(model="m"), math.inf, "ttl must be"),
        (Selector(model="m"), 30 * 86_400 + 1.0, "30 days"),
        (Selector(model="m"), True, "ttl must be"),
        (Selector(model="m"), "1h", "ttl must be"),
    ],
)
def test_what_is_no_pin_is_refused_by_name(cache: MMCache, what: Any, ttl: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cache.pin(what, ttl)


def test_what_names_no_pin_is_refused_by_name(cache: MMCache) -> None:
    with pytest.raises(InvalidKey, match="reason"):
        cache.pin(Selector(model="m"), 1.0, reason="r" * 513)
    for wrong in (0, -1, 1 << 63, [1, 0], [], "1", None, [1] * (MAX_BATCH + 1)):
        with pytest.raises(InvalidKey):
            cache.unpin(wrong)  # type: ignore[arg-type]
    assert cache.unpin([1 << 40]) == 0


def test_as_many_keys_as_may_be_are_pinned_at_once(cache: MMCache) -> None:
    keys = [key_of(f"{number:064x}", version="f1-" + "0" * 64, model="m" * 64) for number in range(MAX_BATCH)]
    pinned = pin(cache, keys, ttl=600.0)
    assert (len(set(pinned.ids)), pinned.entries) == (MAX_BATCH, 0)
    assert cache.pin(keys[0], 1.0).ids == pinned.ids[:1]
    assert cache.unpin(list(pinned.ids[1:])) == MAX_BATCH - 1
    assert cache.unpin(keys) == 1


def test_for_asyncio(serving: Serving, cache: MMCache) -> None:
    pin(cache, key_of("first"), ttl=1.0)

    async def main() -> None:
        async with await AsyncMMCache.connect(serving.config) as other:
            pinned = await other.pin(key_of("async"), 60.0)
            assert await other.unpin(pinned) == 1
            with pytest.raises(InvalidKey):
                await other.pin(Selector(), 60.0)

    asyncio.run(main())


def test_pins_by_rest_are_listed_ended_and_audited(serving: Serving, cache: MMCache) -> None:
    pin(cache, key_of("first"), ttl=1.0)
    with api(serving) as client, api(serving, VIEWER) as viewer:
        body = {"selector": {"model": "rest", "lora": None}, "ttl": 60.0, "reason": "a launch"}
        assert viewer.post("/v1/pins", json=body).status_code == 403
        made = client.post("/v1/pins", json=body)
        assert made.status_code == 201, made.text
        [number] = made.json()["ids"]
        assert abs(made.json()["until"] - time.time() - 60) < LONG
        page = viewer.get("/v1/pins", params={"limit": 1}).json()
        [listed] = page["pins"]
        assert (listed["id"], listed["selector"], listed["reason"], listed["actor"]) == (
            number,
            {"model": "rest", "lora": None},
            "a launch",
            "alice",
        )
        assert page["most_nbytes"] == SEGMENT // 4
        assert viewer.delete(f"/v1/pins/{number}").status_code == 403
        assert client.delete(f"/v1/pins/{number}").json() == {"ids": [number]}
        assert client.delete(f"/v1/pins/{number}").json()["type"] == "urn:mmcache:problem:no-such-pin"
        records = client.get("/v1/audit", params={"limit": 2}).json()["records"]
        assert [(one["action"], one["actor"], one["detail"]["id"]) for one in records] == [
            ("unpin", "alice", number),
            ("pin", "alice", number),
        ]
        key = {"model": "rest", "version": "1", "mm_hash": "x"}
        two = client.post("/v1/pins", json={"keys": [key, {**key, "mm_hash": "y"}, key], "ttl": 1.0})
        assert len(two.json()["ids"]) == 2


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"selector": {"model": "m"}}, "invalid"),
        ({"selector": {"model": "m"}, "ttl": 0}, "invalid"),
        ({"selector": {"model": "m"}, "ttl": -1}, "invalid"),
        ({"selector": {"model": "m"}, "ttl": "60"}, "invalid"),
        ({"selector": {"model": "m"}, "ttl": 2_592_001}, "invalid"),
        ({"selector": {"modle": "m"}, "ttl": 1}, "invalid"),
        ({"selector": {"model": "m"}, "ttl": 1, "forever": True}, "invalid"),
        ({"selector": {}, "ttl": 1}, "selector-empty"),
        ({"ttl": 1}, "invalid"),
        ({"keys": [], "ttl": 1}, "invalid"),
        ({"keys": [{"model": "m"}], "ttl": 1}, "invalid"),
        ({"keys": [{"model": "m", "version": "1", "mm_hash": "x"}], "selector": {"model": "m"}, "ttl": 1}, "invalid"),
        ({"selector": {"model": "m"}, "ttl": 1, "reason": "\n"}, "invalid"),
    ],
)
def test_what_is_no_pin_by_rest_is_a_problem(serving: Serving, body: object, word: str) -> None:
    with api(serving) as client:
        answer = client.post("/v1/pins", json=body)
        assert (answer.status_code, answer.json()["type"]) == (422, f"urn:mmcache:problem:{word}")


def test_a_pin_of_more_than_the_share_by_rest_is_a_problem_with_the_figures(serving: Serving, cache: MMCache) -> None:
    pin(cache, key_of("first"), ttl=1.0)
    put_each(cache, [key_of(f"rest-{number}", version="rest") for number in range(10)])
    with api(serving) as client:
        answer = client.post("/v1/pins", json={"selector": {"version": "rest"}, "ttl": 1.0})
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:mmcache:problem:pin-refused")
    assert f"{SEGMENT:,}" in answer.json()["detail"]


def test_without_the_store_nothing_is_taken_for_lost() -> None:
    with Serving(segment_bytes=SEGMENT, lease_ms=1000, controller_store={"lease": LEASE_S}) as serving:
        serving.controller.kill()
        config = json.loads(serving.controller._config.read_text())
        config["store"]["metrics"] = serving.store.metrics
        serving.controller._config.write_text(json.dumps(config))
        serving.controller.start()
        cache, key = serving.connect(), key_of("kept")
        assert put(cache, [key]) == ["stored"]
        pin(cache, key)
        wait_until(lambda: figures(cache).get("pin.renewed", 0) > 0, timeout=LONG, what="a renewal")
        with serving.store.master.stopped():
            wait_until(lambda: figures(cache).get("pin.not_renewed", 0) > 0, timeout=LONG, what="a try in vain")
            assert figures(cache)["entries_pinned"] == 1
        renewed = figures(cache)["pin.renewed"]
        wait_until(lambda: figures(cache)["pin.renewed"] > renewed, timeout=LONG, what="another renewal")
        assert figures(cache).get("pin.lost", 0) == 0
