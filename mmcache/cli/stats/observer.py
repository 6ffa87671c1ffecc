"""Looks at a cluster as a client of it would: a session, an attachment, and what both ends say of themselves."""

from __future__ import annotations

import os
import socket
import time
from types import TracebackType

import msgspec

from mmcache.cli.control_session import why_no_session
from mmcache.cli.doctor.finding import Status
from mmcache.cli.doctor.network import mooncake_process
from mmcache.config import Settings
from mmcache.control.channel import ControlChannel
from mmcache.control.curve import client_keys
from mmcache.errors import ControllerUnavailable, DeadlineExceeded, MMCacheError
from mmcache.store.launch import Segment, master_is_ready, segments
from mmcache.store.mooncake import MooncakeStore

_REGION_BYTES = 1 << 16
_NO_MEMORY = "start a mooncake_client; one that is stopped or hangs elsewhere is not counted either"


class Controller(msgspec.Struct, frozen=True):
    """The controller, and a session with it."""

    address: str
    fresh: bool
    """Whether this process has a fresh session, without which a client serves nothing."""
    trouble: str = ""
    """Why not, and what to do."""
    lineage: str = ""
    figures: dict[str, int] = {}
    """Sizes of its tables, then what it counted since its start."""


class Store(msgspec.Struct, frozen=True):
    """The store, and an attachment to it; sizes in bytes."""

    master: str
    attached: bool
    """Whether this process is attached, and all that its calls need answers."""
    attachment: str = ""
    """`sidecar` or `embedded`."""
    trouble: str = ""
    metrics: str = ""
    """The master's HTTP port; empty: store.metrics is not set, and nothing is known of segments."""
    metrics_trouble: str = ""
    capacity_bytes: int | None = None
    used_bytes: int | None = None
    segments: list[Segment] = []
    memory_trouble: str = ""
    """Why the master counts no memory, as far as can be told here: it gives up owners that are silent for seconds."""


class Observation(msgspec.Struct, frozen=True):
    """A cluster at one moment."""

    serves: bool
    """Whether a client of this configuration could serve from here."""
    controller: Controller
    store: Store


class Observer:
    """A context manager that may look again and again over one session and one attachment.

    No look takes much longer than `client.connect_timeout` for each end.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        name = settings.client.name or f"{socket.gethostname()}:{os.getpid()}"
        self._channel = ControlChannel(settings.control.address, name=name[:128], keys=client_keys(settings.control))
        self._store: MooncakeStore | None = None

    def __enter__(self) -> Observer:
        self._channel.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        if self._store is not None:
            self._store.close()

    def look(self) -> Observation:
        """The cluster now. Whatever does not answer is told, and nothing raised."""
        store = self._look_at_store()  # first: attaching can hold the interpreter, which a session might not outlive
        controller = self._look_at_controller()
        serves = controller.fresh and store.attached and store.capacity_bytes != 0
        return Observation(serves, controller, store)

    def _look_at_controller(self) -> Controller:
        client, address = self._settings.client, self._settings.control.address
        if self._channel.fresh() is None and (trouble := why_no_session(self._settings.control)):
            return Controller(address, fresh=False, trouble=trouble)
        view = self._channel.wait_fresh(client.connect_timeout)
        if view is None:
            trouble = f"{address} answers, but opened no session: {self._channel.trouble}"
            return Controller(address, fresh=False, trouble=trouble)
        try:
            figures = self._channel.inspect(deadline=time.monotonic() + client.read_timeout)
        except (ControllerUnavailable, DeadlineExceeded) as error:
            fresh = self._channel.fresh() is not None
            return Controller(address, fresh=fresh, trouble=str(error), lineage=view.lineage)
        return Controller(address, fresh=True, lineage=view.lineage, figures=figures)

    def _look_at_store(self) -> Store:
        store = self._settings.store
        attachment = trouble = ""
        attached = False
        try:
            attached = self._attachment().reachable()
            attachment = self._attachment().kind
            if not attached:
                trouble = f"attached, but {self._silent_parts() or 'not everything answered; try again'}"
        except MMCacheError as error:
            trouble = f"{error}. `mmcache doctor` tells more"
        answer = Store(store.master, attached, attachment, trouble, store.metrics or "")
        if store.metrics is None:
            return msgspec.structs.replace(answer, metrics_trouble="store.metrics is not set")
        if not master_is_ready(store.metrics):
            trouble = f"no master answers at store.metrics, {store.metrics}"
            return msgspec.structs.replace(answer, metrics_trouble=trouble)
        listed = segments(store.metrics)
        return msgspec.structs.replace(
            answer,
            capacity_bytes=sum(segment.size_bytes for segment in listed),
            used_bytes=sum(segment.allocator_used_bytes for segment in listed),
            segments=listed,
            memory_trouble="" if listed else self._silent_parts("sidecar") or _NO_MEMORY,
        )

    def _silent_parts(self, *names: str) -> str:
        """Which parts of the store do not answer now (all are asked, or those with these names), and what to do."""
        store = self._settings.store
        parts = {"master": store.master}
        if store.sidecar is not None and store.attach != "embedded":
            parts["sidecar"] = store.sidecar
        findings = [
            mooncake_process(name, address, f"store.{name}")
            for name, address in parts.items()
            if not names or name in names
        ]
        silent = [finding for finding in findings if finding.status is Status.FAILING]
        return "; ".join(f"{finding.name}: {finding.detail}. {finding.advice}" for finding in silent)

    def _attachment(self) -> MooncakeStore:
        if self._store is None:
            self._store = MooncakeStore.from_settings(
                self._settings.store, region_bytes=_REGION_BYTES, timeout=self._settings.client.connect_timeout
            )
        return self._store
