"""A cache for one command: it connects, or says why not, and is closed on every path."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from mmcache.cli.doctor import network
from mmcache.cli.doctor.finding import Status
from mmcache.cli.logs import only_errors_from
from mmcache.config import Settings
from mmcache.control.curve import client_keys
from mmcache.errors import (
    ControllerUnavailable,
    CorruptEntry,
    DeadlineExceeded,
    EntryDropped,
    MMCacheError,
    PoolExhausted,
    StoreUnavailable,
)
from mmcache.store.launch import port_answers

if TYPE_CHECKING:
    from mmcache.client.cache import MMCache

FAILURES: Final = (ControllerUnavailable, CorruptEntry, DeadlineExceeded, EntryDropped, PoolExhausted, StoreUnavailable)
"""What a strict cache raises where others miss or drop."""

UNANSWERED: Final = frozenset({"not_fresh", "unavailable"})
"""Reasons that a failure counts as where the controller, or the store, does not answer."""

_ADVICE: Final[Mapping[str, str]] = {
    "absent": "It was never published under exactly this key, or by clients of another controller, or it was "
    "invalidated or evicted.",
    "not_fresh": "`mmcache doctor` tells more.",
    "unavailable": "`mmcache doctor` tells more.",
    "duplicate": "What is there stays as it is. Put all that changes an output into --version.",
    "deadline": "Raise client.read_timeout or publish_timeout (MMCACHE_CLIENT__READ_TIMEOUT=10s).",
    "larger_than_pool": "Raise client.pool_bytes (MMCACHE_CLIENT__POOL_BYTES=2GiB).",
    "no_memory": "Raise client.pool_bytes (MMCACHE_CLIENT__POOL_BYTES=2GiB).",
    "no_space": "The store is full, or the entry larger than any segment: `mmcache stats` tells. What was published or "
    "read a moment ago cannot be evicted for a lease (store.lease): try again after that.",
    "in_progress": "Another process is publishing it, or died of it: the store lets the name go after 30 s.",
    "refused": "The controller knows as many entries as it may (controller.max_entries), or evicted this one a moment "
    "ago: then it cannot tell these bytes from those, and learns of them at its next listing.",
    "too_large": "controller.max_bytes refuses entries of so many bytes.",
    "too_few_embeddings": "controller.min_embeddings refuses entries of so few embeddings.",
    "not_finite": "client.check_finite refuses values that are not finite.",
    "unsupported": "It needs a newer torch.",
}


def advice_for(reason: str) -> str:
    """What to do about a miss or a drop, as a sentence; empty where there is nothing to be said."""
    return _ADVICE.get(reason, "")


@contextlib.contextmanager
def connected(config: Path | None, **client: object) -> Iterator[MMCache]:
    """A strict cache, connected; progress is told on stderr.

    Args:
        config: as `MMCache.connect` takes it.
        **client: override settings of the client.

    Raises:
        StoreUnavailable, ControllerUnavailable: it cannot serve.
    """
    with only_errors_from("mmcache.client"), Console(stderr=True).status("connecting") as status:
        from mmcache.client.cache import MMCache  # noqa: PLC0415 (torch: seconds, and what fails early needs it not)

        with contextlib.closing(MMCache.connect(config, strict=True, **client)) as cache:
            status.update("transferring")
            yield cache
            status.update("disconnecting")


def check_answers(settings: Settings) -> None:
    """Ask each part first: connecting to one that hangs takes long, and could not say which it was.

    Raises:
        ConfigError: the keys of the settings are of no use.
        StoreUnavailable, ControllerUnavailable: one does not answer; the message says which, and what to do.
    """
    store, keys = settings.store, client_keys(settings.control)
    findings = [network.mooncake_process("master", store.master, "store.master")]
    if store.sidecar is not None and store.attach != "embedded":
        finding = network.mooncake_process("sidecar", store.sidecar, "store.sidecar")
        if store.attach == "sidecar" or port_answers(store.sidecar):  # else it is done without
            findings.append(finding)
    for finding in findings:
        if finding.status is Status.FAILING:
            raise StoreUnavailable(f"{finding.name}: {finding.detail}. {finding.advice}")
    finding = network.controller(settings.control.address, keys=keys)
    if finding.status is Status.FAILING:
        raise ControllerUnavailable(f"{finding.name}: {finding.detail}. {finding.advice}")


def word_for(error: MMCacheError, stats: Mapping[str, float] | None = None) -> str:
    """The reason that a failure counts as; `stats` of the cache know it best."""
    for name in stats or ():
        if name.startswith("miss."):
            return name.removeprefix("miss.")
    match error:
        case EntryDropped() | CorruptEntry():
            return error.reason
        case ControllerUnavailable():
            return "not_fresh"
        case DeadlineExceeded():
            return "deadline"
        case PoolExhausted():
            return "no_memory" if error.fits else "larger_than_pool"
        case _:
            return "unavailable"
