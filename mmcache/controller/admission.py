"""Which clients a controller takes: those whose public keys are in a file, which is read again when it changes.

libzmq asks for each new connection whether its key may come in, over a socket inside this process (ZAP, ZeroMQ RFC 27).
The server's own thread answers. A key that has left the file also has no messages taken of it any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import zmq
from zmq.utils import z85

from mmcache.config import ControllerSettings
from mmcache.control.curve import REFUSED, key_pair
from mmcache.curve import read_keys
from mmcache.errors import ConfigError
from mmcache.private_file import version_of

CLIENT_KEYS: Final = "controller.client_keys_file"
_ENDPOINT: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_DOMAIN: Final = b"mmcache"
_LOOK_EVERY_S: Final = 1.0
_TELL_EVERY_S: Final = 1.0
_BURST: Final = 64
"""Most questions answered before messages have their turn."""

_log = logging.getLogger(__name__)


class Admission:
    """The controller's own key, and those of the clients that it takes. For one thread.

    Args:
        secret_key_file: of the controller.
        client_keys_file: the public keys of its clients.

    Raises:
        ConfigError: a file is of no use. Later such a list is only logged and counted: the one before goes on.
    """

    def __init__(self, secret_key_file: Path, client_keys_file: Path) -> None:
        self._secret, self.public_key = key_pair(secret_key_file, "controller.secret_key_file")
        self._path = client_keys_file
        self._version = version_of(client_keys_file)
        self._allowed: Mapping[str, str] = read_keys(client_keys_file, CLIENT_KEYS)
        self.questions: zmq.Socket[bytes] | None = None
        """Readable when libzmq asks something; see `secure`."""
        self._looked_at = 0.0
        self._told_at = 0.0

    @classmethod
    def of(cls, settings: ControllerSettings) -> Admission | None:
        """As the settings say; None: whoever reaches the controller may speak to it. Raises ConfigError."""
        if settings.secret_key_file is None or settings.client_keys_file is None:
            return None
        return cls(Path(settings.secret_key_file), Path(settings.client_keys_file))

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], server: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Have a socket that is not bound yet take those clients alone.

        Returns `questions`, which is the caller's to close.
        """
        self.questions = questions = context.socket(zmq.REP)
        questions.bind(_ENDPOINT)
        server.set(zmq.CURVE_SERVER, 1)
        server.set(zmq.CURVE_SECRETKEY, self._secret)
        server.set(zmq.ZAP_DOMAIN, _DOMAIN)
        server.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody comes in unasked
        return questions

    def look(self, now: float, count: Callable[[str], None]) -> None:
        """Read the list again if it is another one; at most once a second."""
        if now < self._looked_at + _LOOK_EVERY_S:
            return
        self._looked_at = now
        version = version_of(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._allowed = read_keys(self._path, CLIENT_KEYS)
        except ConfigError as error:
            count("client_keys_broken")
            _log.error("the list of clients that was read last goes on: %s", error)
        else:
            _log.info("read the keys of %d clients from %s", len(self._allowed), self._path)

    def allows(self, frame: zmq.Frame) -> bool:
        """Whether what came in this frame is of a client that is still on the list."""
        try:
            return frame.get("User-Id") in self._allowed
        except zmq.ZMQError:  # of nobody that was asked about
            return False

    def answer(self, now: float, count: Callable[[str], None]) -> None:
        """Tell libzmq who may come in, of those that wait for it."""
        if (questions := self.questions) is None:
            return
        for _ in range(_BURST):
            try:
                question = questions.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            answer = decide(question, self._allowed)
            if answer.refused:
                count(answer.refused)
                if now >= self._told_at + _TELL_EVERY_S:
                    self._told_at = now
                    _log.warning("refused a client at %s: %s", answer.address, answer.detail)
            questions.send_multipart(answer.frames, zmq.DONTWAIT)


class Answer(NamedTuple):
    """To one question of libzmq's. `refused` is a word for counters, empty if the client comes in."""

    frames: list[bytes]
    refused: str = ""
    address: str = ""
    detail: str = ""


def decide(question: Sequence[bytes], allowed: Mapping[str, str]) -> Answer:
    """The answer to a question in ZAP, of any frames at all. Who comes in is known by the key in Z85 from then on."""
    request = question[1] if len(question) > 1 else b""
    if len(question) != 7 or question[0] != _VERSION or question[5] != b"CURVE" or len(question[6]) != 32:
        return Answer(
            [_VERSION, request, b"500", b"no question about a key", b"", b""], "refused.zap", "?", "not CURVE"
        )
    key = z85.encode(question[6]).decode()
    if key in allowed:
        return Answer([_VERSION, request, b"200", b"OK", key.encode(), b""])
    frames = [_VERSION, request, str(REFUSED).encode(), b"the key is not on the list", b"", b""]
    detail = f"its key {key} is not in {CLIENT_KEYS}"
    return Answer(frames, "refused.key", question[3][:64].decode("ascii", "replace"), detail)
