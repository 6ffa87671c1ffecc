"""A controller's figures in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
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
    "store_capacity_bytes": "Memory of the store; 0 as long as that is not known",
    "store_used_bytes": "How much of it is used",
    "entries_removing": "Entries that are chosen to go, or whose removal is out",
    "bytes_removing": "How much they have",
    "quotas_scaled": "1 if the quotas are more than there is, so that each counts for less",
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


def to_prometheus(stats: Mapping[str, int], *, calls: int, broken_token_files: int) -> str:
    """The text.

    Args:
        stats: of `ControllerCore.stats()`.
        calls: of this API that are under way in the core.
        broken_token_files: how often a file of tokens was of no use.
    """
    lines: list[str] = []
    for name, meaning in SIZES.items():
        lines += _one(f"mmcache_controller_{name}", "gauge", meaning, stats.get(name, 0))
    for name, (exported, divisor, meaning) in COUNTS.items():
        count = stats.get(name, 0)
        lines += _one(f"mmcache_controller_{exported}", "counter", meaning, count if divisor == 1 else count / divisor)
    lines += _one("mmcache_controller_admin_calls", "gauge", "Calls of the admin API under way", calls)
    broken = "Times that the file of tokens was of no use"
    lines += _one("mmcache_controller_admin_token_file_broken_total", "counter", broken, broken_token_files)
    name = "mmcache_controller_events_total"
    lines += [f"# HELP {name} What happened since the start", f"# TYPE {name} counter"]
    lines += [
        f'{name}{{event="{_escaped(word)}"}} {count}'
        for word, count in stats.items()
        if word not in SIZES and word not in COUNTS
    ]
    return "\n".join(lines) + "\n"


def _one(name: str, kind: str, meaning: str, value: float) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {value}"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
