"""The connector with a clock on each hook of its scheduler's side, for benchmarks.vllm_epd."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from mmcache.integrations.vllm.connector import MMCacheECConnector

MODULE = __name__
KEPT = 200_000
HOOKS = (
    "ensure_cache_available",
    "has_cache_item",
    "update_state_after_alloc",
    "update_state_after_free",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "take_unavailable_requests",
    "get_ec_connector_stats",
)
IDLE = "build_connector_meta, nothing to run"
"""Where the connector may wait for its agent, lest the engine spin."""

_spent: dict[str, deque[tuple[int, int]]] = {name: deque(maxlen=KEPT) for name in (*HOOKS, IDLE)}


class TimedConnector(MMCacheECConnector):
    """Otherwise the same."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        if role is ECConnectorRole.SCHEDULER:
            for name in HOOKS:
                setattr(self, name, _timed(name, getattr(self, name)))


def taken() -> dict[str, list[tuple[int, int]]]:
    """Nanoseconds of each call since the last time, and those of them that its thread had a core, by hook."""
    times = {name: list(values) for name, values in _spent.items()}
    for values in _spent.values():
        values.clear()
    return times


def _timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    clock, core = time.perf_counter_ns, time.thread_time_ns

    @functools.wraps(hook)
    def call(*arguments: Any, **named: Any) -> Any:
        had_core, started = core(), clock()
        try:
            return hook(*arguments, **named)
        finally:
            spent = clock() - started, core() - had_core
            idle = name == "build_connector_meta" and not arguments[0].total_num_scheduled_tokens
            _spent[IDLE if idle else name].append(spent)

    return call
