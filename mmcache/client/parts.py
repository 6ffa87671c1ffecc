"""What a client is made of: built in one order, ended in another, whoever ends it and whenever."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
import weakref

from mmcache.client.attachment import Attacher
from mmcache.client.calls import IoThreads
from mmcache.client.health import StoreHealth
from mmcache.client.notices import Notices
from mmcache.client.publish import Publisher
from mmcache.client.reads import Reader
from mmcache.config import Settings
from mmcache.control.channel import ControlChannel
from mmcache.control.curve import client_keys
from mmcache.control.tally import Tally
from mmcache.errors import ControllerUnavailable
from mmcache.metrics import Counters
from mmcache.store.binding import prepare_for_exit
from mmcache.store.mooncake import MooncakeStore

_log = logging.getLogger(__name__)

DEFAULT_OBJECT_BYTES = 1 << 20
"""Where neither name nor scope was seen before, a read first tries with a block of this size."""
END_SECONDS = 5.0


class Parts:
    """One client's threads, session, attachment, reader and publisher."""

    def __init__(self, settings: Settings) -> None:
        client = settings.client
        keys = client_keys(settings.control)  # before anything has an end
        name = client.name or f"{socket.gethostname()}:{os.getpid()}"
        self.settings = settings
        self.process = os.getpid()
        self.counters = Counters()
        self.tally = Tally(self.counters)
        self.io = IoThreads(client.io_threads)
        self.attacher = Attacher(
            lambda: MooncakeStore.from_settings(
                settings.store, region_bytes=client.pool_bytes, timeout=client.connect_timeout
            ),
            pool_bytes=client.pool_bytes,
            counters=self.counters,
        )
        self.health = StoreHealth(self.attacher, self.counters)
        self.channel = ControlChannel(
            settings.control.address,
            name=name,
            serves_stale=client.on_stale == "serve",
            keys=keys,
            tally=self.tally if client.tell_uses else None,
            counters=self.counters,
        )
        self.notices = Notices(self.counters)
        self.channel.on_outdated(self.notices.tell)
        self.reader = Reader(
            io=self.io,
            channel=self.channel,
            attacher=self.attacher,
            health=self.health,
            tally=self.tally,
            counters=self.counters,
            verify=client.verify,
            local_entries=client.local_entries,
            default_bytes=min(DEFAULT_OBJECT_BYTES, client.pool_bytes // 16),
        )
        self.publisher = Publisher(
            io=self.io,
            channel=self.channel,
            attacher=self.attacher,
            health=self.health,
            counters=self.counters,
            producer=name,
            local_entries=client.local_entries,
            check_finite=client.check_finite,
            damaged=self.reader.damaged,
        )
        _open.add(self)

    def start(self) -> None:
        """Attach and open a session, within `connect_timeout`; what does not answer is tried on in the background.

        Raises (with `strict` only): StoreUnavailable, ControllerUnavailable.
        """
        client = self.settings.client
        deadline = time.monotonic() + client.connect_timeout
        # The store first: its set-up can hold the interpreter for seconds, which a young session would not outlive.
        attachment = self.attacher.start(client.connect_timeout)
        self.channel.start()
        view = self.channel.wait_fresh(max(0.5, deadline - time.monotonic()))
        if view is None:
            address, trouble = self.settings.control.address, self.channel.trouble
            _log.warning("no session with the controller at %s yet, and reads miss until then: %s", address, trouble)
        if client.strict:
            if attachment is None:
                self.attacher.require()
            if view is None:
                raise ControllerUnavailable(f"no session with the controller at {address}: {trouble}")

    def end(self) -> None:
        """End every part, each within a bound; in a forked child there is nothing to end. Idempotent."""
        _open.discard(self)
        if os.getpid() != self.process:
            return
        self.channel.close()
        self.notices.close()
        deadline = time.monotonic() + END_SECONDS
        self.attacher.close(deadline)
        self.health.close(deadline)
        self.io.close(deadline)

    def end_unattended(self) -> None:
        """The end of a client that was dropped and not closed: on a thread of its own.

        A finaliser may run in any thread and under any lock, so it must not wait for anything itself.
        """
        threading.Thread(target=self.end, name="mmcache-end", daemon=True).start()


_open: weakref.WeakSet[Parts] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for parts in list(_open):
        parts.end()
    prepare_for_exit()
