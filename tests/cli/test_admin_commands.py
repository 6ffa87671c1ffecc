"""The commands that ask the admin API, against that of a real controller."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from commands import Ran, run
from serving import Serving, key_of

from mmcache import EmbeddingKey
from mmcache.cli.admin import listing

VIEWER, OPERATOR = "viewer-" + "v" * 20, "operator-" + "o" * 20
TOKENS = f"""
- {{name: grafana, role: viewer, token: {VIEWER}}}
- {{name: alice, role: operator, token: {OPERATOR}}}
"""
ENTRIES = 5


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(segment_bytes=64 << 20, admin_tokens=TOKENS) as cluster:
        cache = cluster.connect(name="encoder-0")
        for number in range(ENTRIES):
            assert cache.put(key_of(number), torch.ones(8)).readable
        assert cache.put(key_of("adapted", lora="digest", tenant="other", modality="video"), torch.ones(8)).readable
        assert cache.put(key_of("\x1b[31m[red]é", version="odd"), torch.ones(8)).readable
        yield cluster


def ask(serving: Serving, *arguments: str | Path, token: str | None = VIEWER, **environ: str | None) -> Ran:
    return run(
        *arguments,
        config=serving.config,
        MMCACHE_CONTROL__ADMIN=serving.controller.admin,
        MMCACHE_TOKEN=token,
        **environ,
    )


def lines(ran: Ran) -> list[dict[str, Any]]:
    assert ran.status == 0, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


def invalidate(serving: Serving, selector: dict[str, str | None], *, reason: str = "") -> int:
    """Make one by the API, as alice, who is an operator; returns its number."""
    answer = httpx.post(
        f"{serving.controller.admin}/v1/invalidations",
        json={"selector": selector, "reason": reason},
        headers={"Authorization": f"Bearer {OPERATOR}"},
        trust_env=False,
    )
    return int(answer.raise_for_status().json()["number"])


def names(ran: Ran) -> set[str]:
    return {entry["key"]["mm_hash"] for entry in lines(ran)}


def test_sessions_are_listed(serving: Serving) -> None:
    [session] = lines(ask(serving, "sessions", "--json"))
    assert (session["name"], session["live"], session["pid"]) == ("encoder-0", True, os.getpid())
    told = ask(serving, "sessions")
    assert told.status == 0
    assert "encoder-0" in told.out


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], 7),
        (["--model", "encoder", "--version", "1"], ENTRIES + 1),
        (["--version", "2"], 0),
        (["--mm-hash", "item-3"], 1),
        (["--lora", "digest"], 1),
        (["--no-lora"], 6),
        (["--tenant", "other"], 1),
        (["--modality", "video"], 1),
        (["--producer", "encoder-0"], 7),
        (["--producer", "nobody"], 0),
        (["--since", "1h"], 7),
        (["--since", "2020-01-01T00:00:00Z", "--until", "2020-01-02"], 0),
        (["--until", "1h"], 0),
    ],
)
def test_entries_are_found_by_each_filter(serving: Serving, filters: list[str], expected: int) -> None:
    found = ask(serving, "entries", "--json", *filters)
    assert len(lines(found)) == expected
    assert ("none" in found.err) == (not expected)


def test_entries_are_read_page_by_page_up_to_the_limit(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE", 2)
    everything = ask(serving, "entries", "--json", "--limit", "0")
    assert len(names(everything)) == len(lines(everything)) == 7
    assert everything.err == ""
    some = ask(serving, "entries", "--json", "--limit", "3")
    assert len(lines(some)) == 3
    assert names(some) < names(everything)
    assert "--limit" in some.err


def test_what_others_wrote_moves_no_cursor(serving: Serving) -> None:
    told = ask(serving, "entries", "--version", "odd", COLUMNS="200")
    assert told.status == 0
    assert "\x1b" not in told.out
    assert "\\x1b[31m[red]é" in told.out


def test_a_dry_run_counts_and_invalidates_nothing(serving: Serving) -> None:
    counted = ask(serving, "invalidate", "--version", "1", "--dry-run", "--json", token=OPERATOR)
    assert counted.status == 0, counted.err
    assert (counted.json["matches"], counted.json["counted_all"]) == (ENTRIES + 1, True)
    assert counted.json["selector"] == {"version": "1"}
    one = ask(serving, "invalidate", "--mm-hash", "item-0", "--dry-run", token=OPERATOR)
    assert "1 known entry;" in one.out
    everything = ask(serving, "invalidate", "--all", "--dry-run", token=OPERATOR)
    assert "7 known entries" in everything.out
    assert len(lines(ask(serving, "entries", "--json"))) == 7
    assert lines(ask(serving, "audit", "--json")) == []


def test_a_viewer_may_count_nothing(serving: Serving) -> None:
    refused = ask(serving, "invalidate", "--version", "1", "--dry-run")
    assert refused.status == 2
    assert "grafana is viewer; this needs operator" in refused.err


def test_what_was_done_is_listed(tmp_path: Path) -> None:
    with Serving(segment_bytes=16 << 20, admin_tokens=TOKENS) as serving:
        for version in "123":
            invalidate(serving, {"version": version})
        records = lines(ask(serving, "audit", "--json", "--actor", "alice", "--action", "invalidate"))
        assert [record["detail"]["selector"]["version"] for record in records] == ["3", "2", "1"]
        assert lines(ask(serving, "audit", "--json", "--actor", "nobody")) == []
        told = ask(serving, "audit", "--limit", "1", COLUMNS="200")
        assert ("alice" in told.out, "invalidate" in told.out, "--limit" in told.err) == (True, True, True)


def test_a_token_that_is_missing_or_wrong_is_told_with_what_to_set(serving: Serving) -> None:
    for token in (None, "unknown-" + "u" * 20):
        refused = ask(serving, "sessions", token=token)
        assert refused.status == 2
        assert all(word in refused.err for word in ("401", "MMCACHE_TOKEN", "control.token_file"))
        assert "u" * 20 not in refused.err


def test_a_token_in_a_file_that_others_can_read_is_refused(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{VIEWER}\n")
    file.chmod(0o600)
    given = {"MMCACHE_CONTROL__TOKEN_FILE": str(file), "token": None}
    assert ask(serving, "sessions", **given).status == 0
    file.chmod(0o640)
    refused = ask(serving, "sessions", **given)
    assert refused.status == 2
    assert all(word in refused.err for word in ("control.token_file", "chmod 600"))
    file.chmod(0o600)
    for content in (b"", b"two tokens", b"\xff", b"t" * 600):
        file.write_bytes(content)
        refused = ask(serving, "sessions", **given)
        assert refused.status == 2
        assert str(file) in refused.err
    os.unlink(file)
    os.mkfifo(file, 0o600)
    assert "is no file" in ask(serving, "sessions", **given).err


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["sessions", "--admin", "http://user:secret@127.0.0.1:1"], "--admin"),
        (["sessions", "--admin", "127.0.0.1:1"], "--admin"),
        (["entries", "--since", "yesterday"], "--since"),
        (["entries", "--until", "9" * 400 + "h"], "--until"),
        (["entries", "--lora", "d", "--no-lora"], "--no-lora"),
        (["entries", "--model", "two words"], "model"),
        (["entries", "--mm-hash", ""], "mm_hash"),
        (["entries", "--producer", ""], "producer"),
        (["audit", "--actor", "\x00"], "actor"),
        (["invalidate", "--dry-run"], "--all"),
        (["invalidate", "--model", "m", "--dry-run", "--wait"], "--wait"),
    ],
)
def test_a_wrong_option_of_the_admin_commands_is_named(serving: Serving, options: list[str], word: str) -> None:
    refused = ask(serving, *options)
    assert refused.status == 2
    assert word in refused.err
    assert "secret" not in refused.err


def test_where_the_api_is_comes_from_the_same_file_as_the_controller(serving: Serving) -> None:
    config = serving.folder / "controller.yaml"
    assert run("sessions", config=config, MMCACHE_TOKEN=VIEWER).status == 0
    elsewhere = run("sessions", "--admin", "http://127.0.0.1:9", config=config, MMCACHE_TOKEN=VIEWER)
    assert (elsewhere.status, "controller.admin" in elsewhere.err) == (1, True)
    nowhere = run("sessions", config=serving.config, MMCACHE_TOKEN=VIEWER)
    assert (nowhere.status, "control.admin" in nowhere.err) == (2, True)
    free = run("sessions", config=serving.config, MMCACHE_CONTROLLER__ADMIN="127.0.0.1:0")
    assert (free.status, "--admin" in free.err) == (2, True)


def test_a_wildcard_address_is_asked_on_loopback(serving: Serving) -> None:
    port = serving.controller.admin.rpartition(":")[2]
    for host in ("0.0.0.0", "localhost"):
        ran = run("sessions", config=serving.config, MMCACHE_TOKEN=VIEWER, MMCACHE_CONTROLLER__ADMIN=f"{host}:{port}")
        assert ran.status == 0, ran.err


def test_an_invalidation_that_no_client_serves_is_listed_as_complete(serving: Serving) -> None:
    made = run("invalidate", "--version", "nobody's", "--wait", "--json", config=serving.config)
    assert made.json["complete"]
    for arguments in ((), (str(made.json["number"]),)):
        told = ask(serving, "invalidations", *arguments, "--limit", "1")
        assert all(word in told.out for word in ("complete", "version nobody's"))


def test_invalidations_are_listed_newest_first_and_one_with_whom_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE", 2)
    with Serving(segment_bytes=16 << 20, session_ttl=600.0, admin_tokens=TOKENS) as serving:
        assert "none" in ask(serving, "invalidations").err
        for version in "12":
            assert run("invalidate", "--version", version, config=serving.config).status == 0
        worker = serving.start_worker("compute_all", keys=1, seed=0, batch=1)
        assert worker.read()["ready"]
        os.kill(worker.process.pid, signal.SIGSTOP)
        assert invalidate(serving, {"model": "m", "lora": None}, reason="new weights") == 3
        listed = lines(ask(serving, "invalidations", "--json"))
        assert [(one["number"], one["complete"], one["waiting"]) for one in listed] == [
            (3, False, 2),  # one that is stopped, and whoever the controller before this one may have had
            (2, False, 1),
            (1, False, 1),
        ]
        told = ask(serving, "invalidations", "--limit", "1")
        assert "--limit" in told.err
        assert all(
            word in told.out for word in ("waits for 2 sessions ", "alice", "without lora", "reason new weights")
        )
        [one] = lines(ask(serving, "invalidations", "3", "--json"))
        assert (one["selector"], len(one["awaited"])) == ({"model": "m", "lora": None}, 1)
        told = ask(serving, "invalidations", "3")
        assert f"waits for {one['awaited'][0]['name']} on {one['awaited'][0]['host']}" in told.out
        assert str(worker.process.pid) in told.out
        assert "waits for 1 session " in ask(serving, "invalidations", "1").out
        unknown = ask(serving, "invalidations", "4")
        assert (unknown.status, "no invalidation 4" in unknown.err) == (2, True)
        assert ask(serving, "invalidations", "0").status == 2


LONG = {"model": "google/siglip-so400m-patch14-384", "version": "f1-" + "0123456789abcdef" * 4, "tenant": "acme"}
LONG_HASH = "fedcba9876543210" * 4


@pytest.fixture(scope="module")
def long_names() -> Iterator[Serving]:
    with Serving(segment_bytes=16 << 20, admin_tokens=TOKENS) as cluster:
        cache = cluster.connect(name="encoder-7d9f8b6c5d-x2x9z:12345")
        key = EmbeddingKey(**LONG, mm_hash=LONG_HASH, lora="a" * 64)
        assert cache.put(key, torch.ones(8)).readable
        invalidate(cluster, {"model": LONG["model"], "mm_hash": "0" * 64}, reason="wrong crop")
        yield cluster


@pytest.mark.parametrize(
    ("command", "values"),
    [
        ("entries", [*LONG.values(), LONG_HASH, "a" * 64, "encoder-7d9f8b6c5d-x2x9z:12345"]),
        ("sessions", ["encoder-7d9f8b6c5d-x2x9z:12345", str(os.getpid()), "live"]),
        ("audit", ["alice", "invalidate", f"model {LONG['model']}", f"mm_hash {'0' * 64}"]),
        ("invalidations", ["alice", f"model {LONG['model']}", f"mm_hash {'0' * 64}", "reason wrong crop"]),
        ("invalidations 1", ["alice", f"model {LONG['model']}", f"mm_hash {'0' * 64}", "reason wrong crop"]),
    ],
)
def test_a_list_fits_80_columns_and_what_one_copies_is_whole(
    long_names: Serving, command: str, values: list[str]
) -> None:
    told = ask(long_names, *command.split(), COLUMNS="80")
    assert told.status == 0, told.err
    assert all(value in told.out for value in values), told.out
    assert max(len(line) for line in told.out.splitlines()) <= 80, told.out
