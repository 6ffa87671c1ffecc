"""A controller's figures in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mmcache.controller.admin import capacity
from mmcache.controller.views import AccountsView

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX: Final = "mmcache_controller_"
SIZES: Final = {
    "sessions": "Sessions now",
    "entries": "Entries that the directory knows",
    "claims": "Claims now",
    "waiters": "Names that requests wait for",
    "holds": "Names that a dead writer holds",
    "invalidations": "Invalidations that count",
    "invalidations_pending": "Invalidations that are not complete",
    "head": "Number of the last invalidation",
    "removals": "Names whose bytes the store is to give back",
    "quotas_scaled": "1 if the quotas are more than there is, so that each counts for less",
    "pins": "Pins that count",
    "store_entries": "Names of this controller that the store had when it was listed last",
    "store_unknown": "Those of them that the directory does not know",
    "bytes": "Bytes of the entries that the directory knows",
}
"""Of `ControllerCore.stats()`, what is no count since the start."""
COUNTS: Final = {
    "hits": ("hits_total", 1, "Keys that clients found"),
    "missed": ("missed_total", 1, "Keys that clients did not find"),
    "hit_bytes": ("hit_bytes_total", 1, "Bytes of the entries that were found, each time"),
    "saved_ms": ("encode_saved_seconds_total", 1000, "What computing the entries had taken that were found, each time"),
    "published": ("published_total", 1, "Entries that were published"),
    "published_bytes": ("published_bytes_total", 1, "Bytes of the entries that were published"),
    "published_ms": ("encode_published_seconds_total", 1000, "What computing the entries took that were published"),
}
"""And what is a count of something else than events: its name here, how many of it are one there, and what it is."""


ROOM: Final = {
    "store_capacity_bytes": "Bytes that the store may hold",
    "store_used_bytes": "Bytes that it holds",
}
"""Sizes that are not always known."""
ROWS: Final = {
    "entries": ("entries", "gauge", 1, "Entries that the directory knows"),
    "nbytes": ("bytes", "gauge", 1, "Bytes of those entries"),
    "hits": ("hits_total", "counter", 1, "Keys that clients found"),
    "hit_bytes": ("hit_bytes_total", "counter", 1, "Bytes of the entries that were found, each time"),
    "saved_ms": ("encode_saved_seconds_total", "counter", 1000, "What computing those had taken, each time"),
    "published": ("published_total", "counter", 1, "Entries that were published"),
    "published_bytes": ("published_bytes_total", "counter", 1, "Bytes of the entries that were published"),
    "published_ms": ("encode_published_seconds_total", "counter", 1000, "What computing those took"),
}
"""By field of an account: its name here, what it is, how many of it are one there."""


def to_prometheus(stats: Mapping[str, int], held: AccountsView, *, calls: int, broken_token_files: int) -> str:
    """The text.

    Args:
        stats: of `ControllerCore.stats()`.
        held: what is held and was saved by tenant and by model, whose numbers are bounded.
        calls: of this API that are under way in the core.
        broken_token_files: how often a file of tokens was of no use.
    """
    lines: list[str] = []
    for name, meaning in SIZES.items():
        lines += _one(name, "gauge", meaning, stats.get(name, 0))
    for name, (exported, divisor, meaning) in COUNTS.items():
        lines += _one(exported, "counter", meaning, _divided(stats.get(name, 0), divisor))
    for name, meaning in ROOM.items():
        if name in stats:
            lines += _one(name, "gauge", meaning, stats[name])
    states = capacity.states_of(held.total, stats)
    by_state = {state: getattr(states, state) for state in ("present", *capacity.PARTS)}
    entries = {state: of.entries for state, of in by_state.items()}
    lines += _several("state_entries", "gauge", "Entries by state; pinned ones are present as well", "state", entries)
    nbytes = {state: of.nbytes for state, of in by_state.items()}
    lines += _several("state_bytes", "gauge", "Bytes of those entries", "state", nbytes)
    for label, rows in (("tenant", held.by_tenant), ("model", held.by_model)):
        for field, (exported, kind, divisor, meaning) in ROWS.items():
            values = {name: _divided(getattr(row, field), divisor) for name, row in rows.items()}
            lines += _several(f"{label}_{exported}", kind, meaning, label, values)
    evicted = capacity.evicted_of(stats)
    lines += _several("evicted_total", "counter", "Entries that were evicted", "reason", evicted)
    lines += _one("admin_calls", "gauge", "Calls of the admin API under way", calls)
    broken = "Times that the file of tokens was of no use"
    lines += _one("admin_token_file_broken_total", "counter", broken, broken_token_files)
    events = {word: count for word, count in stats.items() if not _has_a_name(word)}
    lines += _several("events_total", "counter", "What happened since the start", "event", events)
    return "\n".join(lines) + "\n"


def _has_a_name(word: str) -> bool:
    """Whether a figure is told under a name of its own, and so is no event."""
    return (
        word in SIZES
        or word in COUNTS
        or word in ROOM
        or word.startswith(capacity.EVICTED)
        or word.removeprefix("entries_").removeprefix("bytes_") in capacity.PARTS
    )


def _one(name: str, kind: str, meaning: str, value: float) -> list[str]:
    return [*_head(name, kind, meaning), f"{_PREFIX}{name} {value}"]


def _several(name: str, kind: str, meaning: str, label: str, values: Mapping[str, float]) -> list[str]:
    """One figure with a label; nothing at all where there are no values."""
    lines = [f'{_PREFIX}{name}{{{label}="{_escaped(word)}"}} {value}' for word, value in values.items()]
    return [*_head(name, kind, meaning), *lines] if lines else []


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP {_PREFIX}{name} {meaning}", f"# TYPE {_PREFIX}{name} {kind}"]


def _divided(count: float, divisor: int) -> float:
    return count if divisor == 1 else count / divisor


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
