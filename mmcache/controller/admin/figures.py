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
}
"""Of `ControllerCore.stats()`, what is no count since the start."""


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
    lines += _one("mmcache_controller_admin_calls", "gauge", "Calls of the admin API under way", calls)
    broken = "Times that the file of tokens was of no use"
    lines += _one("mmcache_controller_admin_token_file_broken_total", "counter", broken, broken_token_files)
    name = "mmcache_controller_events_total"
    lines += [f"# HELP {name} What happened since the start", f"# TYPE {name} counter"]
    lines += [f'{name}{{event="{_escaped(word)}"}} {count}' for word, count in stats.items() if word not in SIZES]
    return "\n".join(lines) + "\n"


def _one(name: str, kind: str, meaning: str, value: int) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {value}"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
