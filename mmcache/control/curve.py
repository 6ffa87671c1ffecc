"""A client's connection by CURVE: its keys, and why the other end broke a connection off before it carried anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from mmcache.config import ControlSettings
from mmcache.curve import read_secret_key
from mmcache.errors import ConfigError

REFUSED: Final = 400
"""ZAP's status of a key that is not on the list."""
_BROKEN_OFF: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True)
class ClientKeys:
    """What a client's end needs, each in Z85."""

    controller: bytes
    """The controller's public key."""
    public: bytes
    secret: bytes = field(repr=False)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket that is not connected yet speak by them."""
        socket.set(zmq.CURVE_SERVERKEY, self.controller)
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self.secret)


def client_keys(settings: ControlSettings) -> ClientKeys | None:
    """The keys that the settings name; None: none. Reads a file. Raises ConfigError."""
    if settings.controller_key is None or settings.secret_key_file is None:
        return None
    secret, public = key_pair(Path(settings.secret_key_file), "control.secret_key_file")
    return ClientKeys(settings.controller_key.encode(), public, secret)


def key_pair(secret_key_file: Path, setting: str) -> tuple[bytes, bytes]:
    """The secret key of a file, and the public one that belongs to it. Raises ConfigError."""
    secret = read_secret_key(secret_key_file, setting).encode()
    if not zmq.has("curve"):
        raise ConfigError(f"{setting} is set, but this pyzmq was built without CURVE: install its wheel")
    return secret, zmq.curve_public(secret)


class BrokenOff(NamedTuple):
    """A connection that did not come about; `reason` is a short word for counters, `trouble` is for people."""

    reason: str
    trouble: str


class Handshake:
    """Watches how the connection of a socket comes about, which must not be connected yet.

    Close it before the socket.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str, keys: ClientKeys | None) -> None:
        self.events = socket.get_monitor_socket(_BROKEN_OFF)
        """Readable when there is something to be told."""
        self._socket = socket
        self._address = address
        self._keys = keys

    def broken_off(self) -> BrokenOff | None:
        """Why the connection did not come about, as far as libzmq can tell; None: nothing tells that it will not."""
        while self.events.poll(0):
            event = recv_monitor_message(self.events)
            if (told := explain(event["event"], event["value"], self._address, self._keys)) is not None:
                return told
        return None

    def close(self) -> None:
        """Watch no more."""
        self._socket.disable_monitor()
        self.events.close(linger=0)


def explain(event: int, value: int, address: str, keys: ClientKeys | None) -> BrokenOff | None:
    """What an event of libzmq's means for a client with these keys. None: it may have been anything."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        if value == REFUSED and keys is not None:
            trouble = (
                f"the controller at {address} refused this client's key: "
                f"add {keys.public.decode()} to its controller.client_keys_file"
            )
            return BrokenOff("key_refused", trouble)
        return BrokenOff("key_unchecked", f"the controller at {address} could not check this client's key: see its log")
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        if keys is None:
            trouble = (
                f"the controller at {address} wants clients with keys: set control.controller_key and "
                "control.secret_key_file (`mmcache keys new`)"
            )
            return BrokenOff("no_key", trouble)
        trouble = (
            f"the controller at {address} has no keys, and this client has: set controller.secret_key_file there, or "
            "leave out control.controller_key and control.secret_key_file here"
        )
        return BrokenOff("controller_without_keys", trouble)
    if keys is None:  # the other end went away, or does not speak ZMTP: another try may do better
        return None
    trouble = (
        f"{address} ended the connection before it was secured: control.controller_key is not the controller's public "
        "key, or no controller is there"
    )
    return BrokenOff("controller_key", trouble)
