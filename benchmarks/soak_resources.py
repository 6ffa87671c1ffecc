"""What each process of the soak uses at rest, and whether that has come back to where it was.

Tolerances, and why they are not zero:

* A client's own memory may grow by OWN_BYTES: allocators keep free memory, and caches of names and sizes fill up.
* What it shares with the store may be its whole pool, and what the load has not touched before the first rest comes in
  later. Memory of an attachment that was replaced is to be given back, but for what lies under tensors.
* Descriptors and native threads may differ by a few, and sockets by more: Mooncake keeps pools of connections to each
  peer, which grow with the calls at one time. And each attachment to a sidecar leaves one descriptor behind, of its
  shared memory: closed, no client of the process could reconnect any more.
* An embedded client keeps up to four connections to the memory of each peer that was killed, half closed, until it is
  attached anew. They count by themselves (`abandoned`), and may be as many as that.
* Threads of mmcache that wait for work are started on demand, up to a number.
* Quarantined memory is bounded: over a quarter of the pool, it is attached anew. A block on top of that may be large.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import psutil

from benchmarks.parts import Parts

MIB: Final = 1 << 20
OWN_BYTES: Final = 32 * MIB
SHARED_SLACK: Final = 8 * MIB
ENTRY_BYTES: Final = 1536
"""Of the controller's memory, an entry of its directory, at most."""
FDS: Final = 6
SOCKETS: Final = 24
ABANDONED_A_PEER: Final = 4
"""Half-closed connections that Mooncake keeps to each `mooncake_client` that is gone."""
NATIVE_THREADS: Final = 4
LARGEST_BLOCK: Final = 8 * MIB + 64 * 1024
ON_DEMAND: Final = {
    "mmcache-health": 1,
    "mmcache-io": 4,
    "mmcache-call": 64,
    "mmcache-compute": 64,
    "asyncio": 64,
    "ThreadPoolExecutor": 64,
}
"""Most threads of each kind that are started when they are needed, and stay."""


def of_parts(parts: Parts) -> dict[str, dict[str, Any]]:
    """Memory and descriptors of master, owner, sidecar and controller."""
    used: dict[str, dict[str, Any]] = {}
    for name, part in parts.parts.items():
        process = psutil.Process(part.pid)
        used[name] = {
            "rss": process.memory_info().rss,
            "fds": process.num_fds(),
            "threads": process.num_threads(),
            "fd_names": fd_names(part.pid),
            "abandoned": abandoned_connections(part.pid),
        }
    return used


def fd_names(pid: int) -> dict[str, int]:
    """How many descriptors of each kind a process has."""
    names: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(f"/proc/{pid}/fd/{fd}")
            names[name.split(":")[0] if name.startswith(("socket:", "pipe:")) else name.split(" ")[0]] += 1
    return dict(sorted(names.items()))


def abandoned_connections(pid: int) -> int:
    """How many TCP connections a process has whose other end is gone."""
    return sum(one.status == psutil.CONN_CLOSE_WAIT for one in psutil.Process(pid).net_connections(kind="tcp"))


def leaks(before: Mapping[str, Any], after: Mapping[str, Any], lent_bytes: Mapping[str, int]) -> list[str]:
    """What has not come back, a sentence each. Both are `{"clients": …, "parts": …, "controller": …, "peers_gone": …}`.

    Args:
        lent_bytes: how much memory each part lends to the store.
    """
    found: list[str] = []
    for name, now in after["clients"].items():
        then = before["clients"].get(name) or {}
        told = _of_client(then, now, after["peers_gone"]) if then and now else ["said nothing"]
        found += [f"{name}: {leak}" for leak in told]
    for name, now in after["parts"].items():
        then = before["parts"][name]
        # What a part lends, and what is attached to it, it may not have touched yet at first.
        may = OWN_BYTES + lent_bytes.get(name, 0)
        if name == "controller":
            may += ENTRY_BYTES * after["controller"].get("entries", 0)
        if name == "sidecar":
            may += sum(int(client.get("pool", {}).get("capacity", 0)) for client in after["clients"].values())
        found += _grown(name, "memory", then["rss"], now["rss"], may)
        found += [f"{name}: {leak}" for leak in _more_descriptors(then, now, FDS, after["peers_gone"])]
    table = after["controller"]
    expected = {"claims": 0, "waiters": 0, "holds": 0, "sessions": len(after["clients"]) + 1}
    for figure, value in expected.items():
        if table.get(figure) != value:
            found.append(f"controller: {table.get(figure)} {figure}, not {value}")
    return found


def _of_client(then: Mapping[str, Any], now: Mapping[str, Any], peers_gone: int) -> list[str]:
    pool = now["pool"]
    if not pool or not now["fresh"]:
        return [f"has no {'pool' if not pool else 'session'} at rest"]
    found = _grown("", "own memory", then["anon"], now["anon"], OWN_BYTES)
    found += _grown("", "shared memory", 0, now["shared"], int(pool["capacity"]) + SHARED_SLACK)
    found += _more_descriptors(then, now, FDS + now["attachments"] - then["attachments"], peers_gone)
    native_then, native_now = (used["threads"] - len(used["thread_names"]) for used in (then, now))
    found += _grown("", "native threads", native_then, native_now, NATIVE_THREADS)
    then_named, now_named = _thread_kinds(then["thread_names"]), _thread_kinds(now["thread_names"])
    for kind, number in now_named.items():
        most = max(then_named[kind], ON_DEMAND.get(kind, 0))
        if number > most:
            found.append(f"{number} threads {kind}, at first {then_named[kind]}")
    if pool["quarantined"] > pool["capacity"] // 4 + LARGEST_BLOCK:
        found.append(f"{pool['quarantined']} of {pool['capacity']} bytes quarantined")
    if pool["used"] != pool["ready_bytes"]:
        found.append(f"{pool['used'] - pool['ready_bytes']} bytes of the pool are neither free nor entries")
    for figure in ("held_blocks", "waiters"):
        if pool[figure]:
            found.append(f"{pool[figure]} {figure} of the pool")
    found += [f"{now[table]} {table}" for table in ("client_claims", "client_requests", "flights") if now[table]]
    return found


def _more_descriptors(then: Mapping[str, Any], now: Mapping[str, Any], may: int, peers_gone: int) -> list[str]:
    sockets_then, sockets_now = (used["fd_names"].get("socket", 0) for used in (then, now))
    living_then, living_now = sockets_then - then["abandoned"], sockets_now - now["abandoned"]
    found = _grown("", "sockets", living_then, living_now, SOCKETS)
    found += _grown("", "abandoned connections", 0, now["abandoned"], ABANDONED_A_PEER * peers_gone)
    return found + _grown("", "descriptors", then["fds"] - sockets_then, now["fds"] - sockets_now, may)


def _thread_kinds(names: list[str]) -> Counter[str]:
    return Counter(name.rstrip("0123456789").rstrip("-_") for name in names)


def _grown(whose: str, what: str, then: float, now: float, may: float) -> list[str]:
    if now <= then + may:
        return []
    unit, scale = (" MiB", MIB) if "memory" in what else ("", 1)
    text = f"{what} grew from {then / scale:.0f} to {now / scale:.0f}{unit}, allowed {may / scale:.0f} more"
    return [f"{whose}: {text}" if whose else text]
