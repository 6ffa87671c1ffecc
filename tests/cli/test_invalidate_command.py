"""`mmcache invalidate` against a real cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from commands import KEY, run
from raw_engine import ALL, RawEngine
from serving import Serving

from mmcache import EmbeddingKey, MMCache


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(segment_bytes=64 << 20) as cluster:
        yield cluster


@pytest.fixture
def cache(serving: Serving) -> MMCache:
    return serving.connect()


def key(name: str, **fields: str | None) -> EmbeddingKey:
    options = dict(zip([option.removeprefix("--") for option in KEY[::2]], KEY[1::2], strict=True))
    return EmbeddingKey(**{**options, "mm_hash": name, **fields})  # type: ignore[arg-type]


def test_what_matches_is_not_served_any_more(serving: Serving, cache: MMCache) -> None:
    plain, adapted = key("photo"), key("photo", lora="digest")
    for one in (plain, adapted):
        assert cache.put(one, torch.ones(8)).readable
    made = run("invalidate", *KEY, "--no-lora", "--mm-hash", "photo", "--wait", "--json", config=serving.config)
    assert made.status == 0
    assert made.json["complete"]
    assert made.json["selector"] == {**dict(zip(["model", "version"], KEY[1::2], strict=True)), "lora": None} | {
        "mm_hash": "photo"
    }
    assert cache.get(plain) is None
    assert cache.get(adapted) is not None
    again = run("invalidate", "--lora", "digest", "--wait", config=serving.config)
    assert "complete" in again.out
    assert cache.get(adapted) is None


def test_all_of_it_needs_a_yes(serving: Serving, cache: MMCache) -> None:
    cache.put(key("all"), torch.ones(8))
    refused = run("invalidate", "--all", config=serving.config)
    assert (refused.status, "--yes" in refused.err) == (2, True)
    assert cache.get(key("all")) is not None
    assert run("invalidate", "--all", "--yes", "--wait", config=serving.config).status == 0
    assert cache.get(key("all")) is None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([], "--all"),
        (["--lora", "d", "--no-lora"], "--no-lora"),
        (["--model", "m", "--all", "--yes"], "--all"),
        (["--model", "two words"], "model"),
        (["--mm-hash", ""], "mm_hash"),
        (["--model", "m", "--reason", "r" * 600], "reason"),
        (["--model", "m", "--engine", "http://127.0.0.1:1"], "--engine needs --wait"),
        (["--model", "m", "--engines"], "--engines needs --wait"),
        (["--model", "m", "--wait", "--engine", "127.0.0.1:1"], "--engine"),
        (["--model", "m", "--wait", "--engine", "http://u:p@127.0.0.1:1"], "credentials"),
        (["--model", "m", "--wait", "--engines"], "engines.urls"),
        (["--model", "m", "--dry-run", "--engine", "http://127.0.0.1:1"], "(--engine)"),
        (["--model", "m", "--dry-run", "--engines"], "(--engines)"),
        (["--model", "m", "--dry-run", "--wait"], "(--wait)"),
    ],
)
def test_a_wrong_option_is_named(serving: Serving, options: list[str], word: str) -> None:
    refused = run("invalidate", *options, config=serving.config)
    assert refused.status == 2
    assert word in refused.err


def test_who_is_silent_is_waited_for(serving: Serving) -> None:
    worker = serving.start_worker("compute_all", keys=1, seed=0, batch=1)
    assert worker.read()["ready"]
    os.kill(worker.process.pid, signal.SIGSTOP)
    assert run("invalidate", "--mm-hash", "nobody's", "--wait", config=serving.config).status == 0
    os.kill(worker.process.pid, signal.SIGCONT)


def test_ctrl_c_while_it_waits_says_that_it_is_in_force(
    serving: Serving, cache: MMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(key("interrupted"), torch.ones(8))
    monkeypatch.setattr("mmcache.client.invalidate.follow", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    worker = serving.start_worker("compute_all", keys=1, seed=0, batch=1)
    assert worker.read()["ready"]
    os.kill(worker.process.pid, signal.SIGSTOP)
    ended = run("invalidate", *KEY, "--mm-hash", "interrupted", "--wait", config=serving.config)
    os.kill(worker.process.pid, signal.SIGCONT)
    assert (ended.status, ended.out) == (128 + signal.SIGINT, "")
    assert "is in force" in ended.err
    assert cache.get(key("interrupted")) is None


def test_engines_are_cleared_once_it_is_complete(serving: Serving) -> None:
    with RawEngine(busy=1) as engine:
        made = run("invalidate", *KEY, "--wait", "--engine", engine.url, "--json", config=serving.config)
        assert made.status == 0
        [told] = made.json["engines"]
        assert (told["url"], told["ok"], len(told["results"])) == (engine.url, True, 3)
        configured = {"MMCACHE_ENGINES__URLS": f"[{engine.url}]"}
        again = run("invalidate", *KEY, "--wait", "--engines", config=serving.config, **configured)
        assert (again.status, f"engine {engine.url}: cleared" in again.out) == (0, True)
        assert engine.targets == [*ALL, ALL[-1], *ALL]
        assert run("invalidate", *KEY, "--wait", config=serving.config, **configured).status == 0
        assert len(engine.asked) == 7, "which nobody asked for"


def test_an_engine_that_was_not_cleared_is_told_by_the_status(serving: Serving, cache: MMCache) -> None:
    assert cache.put(key("engine"), torch.ones(8)).readable
    with RawEngine() as engine, RawEngine(developing=False) as closed:
        options = ("--mm-hash", "engine", "--wait", "--engine", closed.url, "--engine", engine.url)
        made = run("invalidate", *options, config=serving.config)
        assert made.status == 3
        assert f"engine {engine.url}: cleared" in made.out
        assert f"engine {closed.url}: not cleared" in made.out
        assert "VLLM_SERVER_DEV_MODE=1" in made.out
    assert cache.get(key("engine")) is None


def test_who_is_silent_is_named_and_no_engine_cleared_before_it_is_complete() -> None:
    with Serving(segment_bytes=16 << 20, session_ttl=600.0) as serving, RawEngine() as engine:
        worker = serving.start_worker("compute_all", keys=1, seed=0, batch=1)
        assert worker.read()["ready"]
        os.kill(worker.process.pid, signal.SIGSTOP)
        options = ("--mm-hash", "nobody's", "--wait", "--timeout", "5", "--engine", engine.url)
        early = run("invalidate", *options, config=serving.config)
        assert (early.status, str(worker.process.pid) in early.out) == (1, True), early
        assert "not complete: 2 sessions may serve it still" in early.out
        early = run("invalidate", *options, "--json", config=serving.config)
        assert (early.status, early.json["engines"][0]["ok"]) == (1, False)
        assert engine.asked == []


def test_without_a_controller_it_says_so(serving: Serving, tmp_path: object) -> None:
    config = serving.folder / "nobody.yaml"
    config.write_text('{"control": {"address": "tcp://127.0.0.1:9"}, "client": {"connect_timeout": 1}}')
    failed = run("invalidate", "--model", "m", config=config)
    assert failed.status == 1
    assert "127.0.0.1:9" in failed.err
