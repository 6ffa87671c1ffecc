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
from mmcache.config import ControlSettings, Settings
from mmcache.control.channel import ControlChannel
from mmcache.control.curve import client_keys
from mmcache.errors import ControllerUnavailable


@contextlib.contextmanager
def open_channel(settings: Settings) -> Iterator[tuple[ControlChannel, float]]:
    """A channel with a fresh session, and until when its answers are worth waiting for (`time.monotonic()`).

    Raises:
        ConfigError: the keys of the settings are of no use.
        ControllerUnavailable: there is none within client.connect_timeout; the message says why, and what to do.
    """
    client, address = settings.client, settings.control.address
    name = client.name or f"{socket.gethostname()}:{os.getpid()}"
    with contextlib.closing(ControlChannel(address, name=name[:128], keys=client_keys(settings.control))) as channel:
        with Console(stderr=True).status(f"connecting to the controller at {address}"):
            if trouble := why_no_session(settings.control):  # asked first: the channel would only wait
                raise ControllerUnavailable(trouble)
            channel.start()
            if channel.wait_fresh(client.connect_timeout) is None:
                raise ControllerUnavailable(f"{address} answers, but opened no session: {channel.trouble}")
        yield channel, time.monotonic() + client.read_timeout


def why_no_session(settings: ControlSettings) -> str:
    """What is wrong with the controller, and what to do; empty: nothing is. Raises ConfigError."""
    finding = controller(settings.address, keys=client_keys(settings))
    return "" if finding.status is Status.OK else f"{finding.detail}. {finding.advice}"
