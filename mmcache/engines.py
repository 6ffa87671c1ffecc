"""Clears the caches that vLLM engines hold of their own, which no invalidation reaches.

Only once an invalidation is complete: before, an engine would fill them again from an entry that is stale. It serves
these endpoints where it was started with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from mmcache.config import EnginesSettings
from mmcache.errors import ConfigError
from mmcache.http_call import Answer, NoAnswer, call
from mmcache.private_file import read_token

ENCODER: Final = "/reset_encoder_cache"
PROCESSOR: Final = "/reset_mm_cache"
PREFIX: Final = "/reset_prefix_cache"
ENDPOINTS: Final = (ENCODER, PROCESSOR, PREFIX)
"""In the order in which they are asked. Blocks of the prefix cache are made from embeddings, so it is cleared when no
embedding is there any more that a new block could be made from."""
_QUERIES: Final = {PREFIX: "?reset_external=true"}
"""Blocks that a KV connector keeps elsewhere would come back from there."""
_MOST_BYTES: Final = 64 << 10
_IN_USE: Final = (
    "in use by requests until the time was over (or its KV connector's was): stop or pause its traffic (POST /pause), "
    "and try again"
)
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


class Reset(msgspec.Struct, frozen=True):
    """What became of one cache of an engine; `detail` says why it was not cleared, and what to do."""

    endpoint: str
    ok: bool
    detail: str = ""


class ClearedEngine(msgspec.Struct, frozen=True):
    """What became of one engine's caches, in the order of `ENDPOINTS`. `ok`: all of them were cleared."""

    url: str
    ok: bool
    results: list[Reset]


def token_of(settings: EnginesSettings) -> str | None:
    """The token for engines, if there is one. Raises ConfigError."""
    if settings.token_file is None:
        return None
    try:
        return read_token(Path(settings.token_file))
    except ConfigError as error:
        raise ConfigError(f"engines.token_file: {error}") from error


def clear(urls: Sequence[str], *, timeout: float, token: str | None = None) -> list[ClearedEngine]:
    """Have all engines clear their caches, at once; none waits for another.

    Args:
        urls: as `setting_kinds.Urls` takes them.
        timeout: seconds for each engine. Within it a prefix cache is asked again and again while it is in use.
        token: is sent to all of them.
    """
    if not urls:
        return []
    deadline = time.monotonic() + timeout
    try:
        with ThreadPoolExecutor(len(urls), thread_name_prefix="mmcache-engines") as pool:
            return list(pool.map(lambda url: _clear(url, deadline, token), urls))
    except RuntimeError as error:  # no thread to be had
        return not_cleared(urls, str(error))


def not_cleared(urls: Sequence[str], why: str) -> list[ClearedEngine]:
    """What is told of engines that were not asked."""
    return [
        _told(url, [Reset(endpoint, ok=False, detail=f"not asked: {why}") for endpoint in ENDPOINTS]) for url in urls
    ]


def _told(url: str, results: list[Reset]) -> ClearedEngine:
    return ClearedEngine(url, all(result.ok for result in results), results)


def _clear(url: str, deadline: float, token: str | None) -> ClearedEngine:
    return _told(url, [_reset(url, endpoint, deadline, token) for endpoint in ENDPOINTS])


def _reset(url: str, endpoint: str, deadline: float, token: str | None) -> Reset:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    pause = _FIRST_PAUSE_S
    detail = "not asked: the time was over"
    while (left := deadline - time.monotonic()) > 0:
        try:
            answer = call(
                "POST",
                f"{url}{endpoint}{_QUERIES.get(endpoint, '')}",
                timeout=left,
                headers=headers,
                body=b"",
                most_bytes=_MOST_BYTES,
            )
        except NoAnswer as error:
            return Reset(endpoint, ok=False, detail=str(error))
        if answer.status != 200:
            return Reset(endpoint, ok=False, detail=_refusal(answer.status))
        success = _success(answer) if endpoint == PREFIX else True
        if success is None:
            return Reset(endpoint, ok=False, detail="answered 200, but not whether it was cleared: is it vLLM?")
        if success:
            return Reset(endpoint, ok=True)
        detail = _IN_USE
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return Reset(endpoint, ok=False, detail=detail)


class _Success(msgspec.Struct):
    success: bool


def _success(answer: Answer) -> bool | None:
    """Whether vLLM says that it did it; None: it does not say."""
    try:
        return msgspec.json.decode(answer.body, type=_Success).success
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _refusal(status: int) -> str:
    if status == 404:
        return "404: not served there; start the engine with VLLM_SERVER_DEV_MODE=1, on a port that others cannot reach"
    if status in (401, 403):
        return f"{status}: it wants a token; set engines.token_file"
    if 300 <= status < 400:
        return f"{status}: it refers to another place, which is not followed; give that place's URL"
    return f"{status}: its log says why"
