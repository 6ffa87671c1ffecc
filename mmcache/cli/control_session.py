"""A session with the controller for one command."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

from rich.console import Console

from mmcache.cli.doctor.finding import Status
from mmcache.cli.doctor.network import controller
from mmcache.config import Settings
from mmcache.control.channel import ControlChannel
from mmcache.errors import ControllerUnavailable


@contextlib.contextmanager
def open_channel(settings: Settings) -> Iterator[tuple[ControlChannel, float]]:
    """A channel with a fresh session, and until when its answers are worth waiting for (`time.monotonic()`).

    Raises:
        ControllerUnavailable: there is none within client.connect_timeout; the message says why, and what to do.
    """
    client, address = settings.client, settings.control.address
    name = client.name or f"{socket.gethostname()}:{os.getpid()}"
    with contextlib.closing(ControlChannel(address, name=name[:128])) as channel:
        with Console(stderr=True).status(f"connecting to the controller at {address}"):
            if trouble := why_no_session(address):  # asked first: the channel would only wait
                raise ControllerUnavailable(trouble)
            channel.start()
            if channel.wait_fresh(client.connect_timeout) is None:
                raise ControllerUnavailable(f"{address} answers, but opened no session; try again")
        yield channel, time.monotonic() + client.read_timeout


def why_no_session(address: str) -> str:
    """What is wrong with the controller at `address`, and what to do; empty: nothing is."""
    finding = controller(address)
    return "" if finding.status is Status.OK else f"{finding.detail}. {finding.advice}"
