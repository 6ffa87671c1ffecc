"""Engines' own caches: each is cleared by itself, within its time, whatever the others do."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from raw_engine import ALL, RawEngine
from raw_http import PATIENCE_S, Asked, RawServer, response

from mmcache.config import EnginesSettings
from mmcache.engines import ENDPOINTS, PREFIX, ClearedEngine, clear, not_cleared, token_of
from mmcache.errors import ConfigError

SHORT_S = 0.5


def failures(engine: ClearedEngine) -> dict[str, str]:
    assert [result.endpoint for result in engine.results] == list(ENDPOINTS)
    assert engine.ok == all(result.ok for result in engine.results)
    return {result.endpoint: result.detail for result in engine.results if not result.ok}


def test_an_engine_clears_its_embeddings_first_and_its_prefixes_last() -> None:
    with RawEngine() as engine:
        [told] = clear([engine.url], timeout=PATIENCE_S, token="secret")
        assert (told.url, told.ok, failures(told)) == (engine.url, True, {})
        assert engine.targets == ALL
        assert {asked.method for asked in engine.asked} == {"POST"}
        assert {asked.headers["authorization"] for asked in engine.asked} == {"Bearer secret"}


def test_without_a_token_none_is_sent() -> None:
    with RawEngine() as engine:
        assert clear([engine.url], timeout=PATIENCE_S)[0].ok
        assert not any("authorization" in asked.headers for asked in engine.asked)


def test_a_prefix_cache_in_use_is_asked_again_until_it_is_free() -> None:
    with RawEngine(busy=3) as engine:
        [told] = clear([engine.url], timeout=PATIENCE_S)
        assert told.ok
        assert engine.targets == [*ALL, *ALL[-1:] * 3]


def test_a_prefix_cache_that_stays_in_use_is_told_when_the_time_is_over() -> None:
    with RawEngine(busy=1 << 30) as engine:
        [told] = clear([engine.url], timeout=SHORT_S)
        assert set(failures(told)) == {PREFIX}
        assert "in use" in failures(told)[PREFIX]
        asked = len(engine.asked)
        assert 3 < asked < 15, "pauses grow"


def test_an_engine_that_fails_holds_no_other_up() -> None:
    with (
        RawEngine() as good,
        RawEngine(developing=False) as closed,
        RawServer(lambda *_: None) as silent,
        RawServer(lambda *_: response(500)) as broken,
        socket.create_server(("127.0.0.1", 0)) as gone,
    ):
        dead = f"http://127.0.0.1:{gone.getsockname()[1]}"
        gone.close()
        began = time.monotonic()
        urls = [silent.url, dead, closed.url, broken.url, good.url]
        told = clear(urls, timeout=3.0)
        took = time.monotonic() - began
        assert [engine.url for engine in told] == urls
        assert [engine.ok for engine in told] == [False, False, False, False, True]
        for engine, word in zip(told[1:4], ("refused", "VLLM_SERVER_DEV_MODE=1", "500"), strict=True):
            assert all(word in detail for detail in failures(engine).values())
        assert "no answer within" in failures(told[0])[ENDPOINTS[0]]
        assert "not asked" in failures(told[0])[PREFIX]
        assert all(asked.at - began < 2.5 for asked in good.asked), "it waited for one that hangs"
        assert took < PATIENCE_S


def test_one_endpoint_that_fails_leaves_the_others_to_be_asked() -> None:
    def answer(asked: Asked, _: socket.socket) -> bytes:
        return response(404) if asked.target == ENDPOINTS[0] else response(200, b'{"success": true}')

    with RawServer(answer) as engine:
        [told] = clear([engine.url], timeout=PATIENCE_S)
        assert set(failures(told)) == {ENDPOINTS[0]}
        assert engine.targets == ALL


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b"null", b"true", b"\xff", b'{"success": 1}', b'{"success": "true"}', b"<html>", b"[" * 50_000],
)
def test_what_does_not_say_that_it_was_cleared_was_not(body: bytes) -> None:
    with RawServer(lambda *_: response(200, body)) as engine:
        [told] = clear([engine.url], timeout=PATIENCE_S)
        assert "is it vLLM?" in failures(told)[PREFIX]
        assert len(engine.asked) == len(ALL)


def test_a_huge_answer_is_not_read() -> None:
    with RawServer(lambda *_: response(200, b"x" * (1 << 20))) as engine:
        [told] = clear([engine.url], timeout=PATIENCE_S)
        assert all("more than" in detail for detail in failures(told).values())
        assert len(failures(told)) == len(ENDPOINTS)


def test_a_token_goes_to_no_other_place() -> None:
    with RawEngine() as elsewhere:

        def answer(asked: Asked, _: socket.socket) -> bytes:
            return response(307, location=elsewhere.url + asked.target)

        with RawServer(answer) as engine:
            [told] = clear([engine.url], timeout=PATIENCE_S, token="secret")
        assert all("not followed" in detail for detail in failures(told).values())
        assert elsewhere.asked == []


def test_no_engines_are_no_work_and_those_not_asked_are_told() -> None:
    assert clear([], timeout=1.0) == []
    [told] = not_cleared(["http://a:1"], "because")
    assert set(failures(told).values()) == {"not asked: because"}


def test_the_token_is_read_from_a_private_file(tmp_path: Path) -> None:
    assert token_of(EnginesSettings()) is None
    file = tmp_path / "token"
    file.write_text("abc\n")
    file.chmod(0o600)
    settings = EnginesSettings(token_file=str(file))
    assert token_of(settings) == "abc"
    file.chmod(0o604)
    with pytest.raises(ConfigError, match=r"engines\.token_file.*chmod 600"):
        token_of(settings)
