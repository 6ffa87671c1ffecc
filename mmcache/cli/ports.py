"""TCP ports of a cluster on this machine's loopback interface."""

from __future__ import annotations

import contextlib
import socket
from typing import NamedTuple

from mmcache.cli.errors import ClusterError

LOOPBACK = "127.0.0.1"


class Ports(NamedTuple):
    """One port for each purpose; where it is asked for, 0 means any that is free, and None that none is wanted."""

    master: int = 0
    metrics: int = 0
    owner: int = 0
    control: int = 0
    admin: int | None = None

    def choose(self) -> Ports:
        """These, with a free port of its own in place of each 0. It may be taken by another process meanwhile.

        Raises:
            ClusterError: a port that was asked for by number is in use, or asked for twice.
        """
        with contextlib.ExitStack() as held:  # all at once, so that none is chosen twice
            wanted = {purpose: port for purpose, port in self._asdict().items() if port is not None}
            return self._replace(**{purpose: self._bind(purpose, port, held) for purpose, port in wanted.items()})

    def lost(self, chosen: Ports) -> bool:
        """Whether a port that was free when it was chosen for a 0 is in use now."""
        return any(
            asked == 0 and port is not None and not _is_free(port) for asked, port in zip(self, chosen, strict=True)
        )

    @staticmethod
    def _bind(purpose: str, port: int, held: contextlib.ExitStack) -> int:
        try:
            return int(held.enter_context(_listener(port)).getsockname()[1])
        except OSError as error:
            raise ClusterError(f"port {port} (--{purpose}-port) cannot be had: {error.strerror}") from error


def _listener(port: int) -> socket.socket:
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not keep a port
        listener.bind((LOOPBACK, port))
        listener.listen(1)  # with the option alone, two could bind
    except OSError:
        listener.close()
        raise
    return listener


def _is_free(port: int) -> bool:
    try:
        _listener(port).close()
    except OSError:
        return False
    return True
