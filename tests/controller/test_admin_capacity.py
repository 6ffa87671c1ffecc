"""What is held and was saved, by the admin API: as JSON, for Prometheus, and the entries that are used most."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from admin_api import PATIENCE_S, VIEWER, AdminApi, assert_problem
from cluster import wait_until
from controller_driver import World
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcache.control.channel import CommitEntry, ControlChannel
from mmcache.control.messages import CommitStatus
from mmcache.control.tally import Tally
from mmcache.controller import views as views_module
from mmcache.controller.accounts import Account, Accounts
from mmcache.controller.admin import capacity, figures
from mmcache.controller.views import START, AccountsView, Wanted
from mmcache.key import EmbeddingKey, Scope, mm_digest

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
EVICTIONS = {"evicted.watermark": 5, "evicted.quota": 2, "evicted": 7}
KEYS = {
    "hot": EmbeddingKey("siglip", "1", "hot"),
    "warm": EmbeddingKey("siglip", "1", "warm", tenant="other"),
    "cold": EmbeddingKey("qwen", "1", "cold"),
}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminApi]:
    """With three entries, of which one was hit three times, one once and one never, and four keys that were missed."""
    tally = Tally()
    with (
        AdminApi(tmp_path_factory.mktemp("admin")) as api,
        contextlib.closing(ControlChannel(api.control, name="client", tally=tally)) as channel,
    ):
        channel.start()
        assert channel.wait_fresh(PATIENCE_S) is not None
        entries = [CommitEntry(key, 0, 0, 1000, 5.0, b"") for key in KEYS.values()]
        assert set(channel.commit(entries, deadline=1e12)) == {CommitStatus.STORED}
        tally.found([KEYS["hot"]] * 3 + [KEYS["warm"]])
        tally.missed(4)
        wait_until(lambda: api.core.stats()["hits"] == 4, timeout=PATIENCE_S, what="what was hit")
        yield api


def account(**fields: float) -> dict[str, float]:
    empty = dict.fromkeys(Account.__struct_fields__, 0)
    return {**empty, **fields}


def test_it_tells_what_is_held_and_was_saved_by_tenant_and_by_model(api: AdminApi) -> None:
    with api.connect(VIEWER) as viewer:
        answer = viewer.get("/v1/capacity").json()
    assert answer["term"] == viewer_term(api)
    published = {"published": 3, "published_bytes": 3000, "published_ms": 15.0}
    assert answer["total"] == account(entries=3, nbytes=3000, hits=4, hit_bytes=4000, saved_ms=20.0, **published)
    assert answer["missed"] == 4
    assert answer["hit_ratios"] == {"entries": 4 / 8, "nbytes": 4 / 7, "encode_time": 20 / 35}
    assert {row["name"]: (row["nbytes"], row["hits"]) for row in answer["tenants"]} == {
        "default": (2000, 3),
        "other": (1000, 1),
    }
    assert [row["name"] for row in answer["models"]] == ["siglip", "qwen"], "the most bytes first"
    assert answer["states"]["present"] == {"entries": 3, "nbytes": 3000}
    assert (answer["evicted"], answer["store"]) == ({}, {"capacity_bytes": None, "used_bytes": None})


def viewer_term(api: AdminApi) -> str:
    return str(api.client.get("/v1/stats").json()["term"])


def test_what_the_core_says_of_states_evictions_and_the_store_is_told() -> None:
    stats = {"entries_removing": 2, "bytes_removing": 300, "entries_pinned": 1, "bytes_pinned": 7, **EVICTIONS}
    stats |= {"store_capacity_bytes": 1 << 30, "store_used_bytes": 5}
    held = AccountsView(Account(entries=5, nbytes=1000), 0, {}, {})
    told = capacity.made_of(held, stats, term=1)
    states = told.states
    assert (states.present.entries, states.present.nbytes) == (3, 700)
    assert (states.removing.entries, states.removing.nbytes) == (2, 300)
    assert (states.pinned.entries, states.pinned.nbytes) == (1, 7)
    assert told.evicted == {"watermark": 5, "quota": 2}
    assert (told.store.capacity_bytes, told.store.used_bytes) == (1 << 30, 5)
    assert told.hit_ratios == capacity.HitRatios(entries=None, nbytes=None, encode_time=None), "of nothing"


def test_the_entries_that_are_used_most_come_first(api: AdminApi) -> None:
    def hottest(**query: object) -> list[tuple[str, int]]:
        page = api.client.get("/v1/entries", params={"order": "hottest", **query}).json()
        assert page["next"] is None
        return [(entry["key"]["mm_hash"], entry["uses"]) for entry in page["entries"]]

    assert hottest() == [("hot", 3), ("warm", 1), ("cold", 0)]
    assert hottest(limit=1) == [("hot", 3)]
    assert hottest(model="qwen") == [("cold", 0)]
    assert hottest(tenant="nobody") == []
    assert_problem(api.client.get("/v1/entries?order=hottest&cursor=0000"), 422, "invalid")
    assert_problem(api.client.get("/v1/entries?order=newest"), 422, "invalid")
    name = api.client.get("/v1/entries", params={"mm_hash": "hot"}).json()["entries"][0]["name"]
    full = api.client.get(f"/v1/entries/{name}").json()
    assert (full["uses"], full["cost_ms"]) == (3, 5.0)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 6), st.integers(100, 5000))
def test_of_all_pieces_together_none_is_hotter_than_those_that_are_chosen(
    uses: list[int], limit: int, looked_at: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views_module, "MOST_LOOKED_AT", looked_at)
        world = World()
        world.client("c").put(*(str(number) for number in range(len(uses))))
        [scope] = world.core._entries.scopes
        for number, count in enumerate(uses):
            entry = world.core._entries.directory.entry(scope + mm_digest(str(number)))
            assert entry is not None
            entry.uses = count
        after: bytes | None = START
        found: list[int] = []
        while after is not None:
            above = sorted(found)[-limit] if len(found) >= limit else -1
            page, after = world.core.views.hottest(Wanted(), after, limit, above)
            counts = [entry.uses for entry in page]
            assert counts == sorted(counts, reverse=True)
            assert len(counts) <= limit
            assert not counts or counts[-1] > above
            found += counts
        assert sorted(found, reverse=True)[:limit] == sorted(uses, reverse=True)[:limit]


def names_of(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))


def test_prometheus_gets_all_of_it_under_names_that_are_documented(api: AdminApi) -> None:
    text = api.client.get("/metrics").text
    for line in (
        "mmcache_controller_hits_total 4",
        "mmcache_controller_missed_total 4",
        "mmcache_controller_bytes 3000",
        "mmcache_controller_encode_saved_seconds_total 0.02",
        'mmcache_controller_tenant_bytes{tenant="other"} 1000',
        'mmcache_controller_model_hits_total{model="siglip"} 4',
        'mmcache_controller_model_encode_published_seconds_total{model="qwen"} 0.005',
        'mmcache_controller_state_bytes{state="present"} 3000',
    ):
        assert f"{line}\n" in text
    stats = {**api.core.stats(), **EVICTIONS, "entries_pinned": 1, "store_capacity_bytes": 9, "store_used_bytes": 1}
    full = figures.to_prometheus(stats, api.core.views.accounts(), calls=0, broken_token_files=0)
    assert 'mmcache_controller_evicted_total{reason="quota"} 2\n' in full
    assert 'mmcache_controller_state_entries{state="pinned"} 1\n' in full
    events = set(re.findall(r'events_total\{event="(.*)"\}', full))
    assert not events & {"hits", "saved_ms", "bytes", "entries_pinned", "store_used_bytes", "evicted.quota"}
    documented = set(re.findall(r"`(mmcache_controller_\w+)[`{]", OPERATIONS.read_text()))
    assert names_of(full) == documented


def test_labels_are_bounded_and_whatever_a_name_holds_is_escaped() -> None:
    scopes = [Scope(f't"{number}\\', f"m{number}", "1", None, "image") for number in range(50)]
    accounts = Accounts({scope.digest: scope for scope in scopes}, most_rows=10)
    for scope in scopes:
        accounts.held(scope.digest, 1, 1)
    held = AccountsView(accounts.total, 0, accounts.by_tenant, accounts.by_model)
    text = figures.to_prometheus({}, held, calls=0, broken_token_files=0)
    assert 'mmcache_controller_tenant_entries{tenant="t\\"0\\\\"} 1\n' in text
    assert 'mmcache_controller_tenant_entries{tenant="(other)"} 41\n' in text
    assert text.count("mmcache_controller_tenant_entries{") == text.count("mmcache_controller_model_entries{") == 10
