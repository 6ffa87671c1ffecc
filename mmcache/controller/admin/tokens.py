"""Who may use the API, and as what: bearer tokens of a file and of the environment.

    - {name: grafana, role: viewer, sha256: 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b}
    - {name: alice, role: operator, token: "a long random text", expires: 2027-01-31T00:00:00Z}

A YAML list, and so also JSON. `MMCACHE_ADMIN_TOKENS` holds the same text. The file is read again when it changes.
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import hmac
import logging
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import yaml

from mmcache.errors import ConfigError
from mmcache.private_file import read_private, version_of

VARIABLE: Final = "MMCACHE_ADMIN_TOKENS"
MAX_TOKENS: Final = 1_000
MAX_TOKEN_CHARACTERS: Final = 512
LEAST_TOKEN_CHARACTERS: Final = 20
"""Of a token that is given as it is: fewer can be guessed."""
_MAX_FILE_BYTES: Final = 1 << 20
_LOOK_EVERY_S: Final = 1.0
_FIELDS: Final = frozenset({"name", "role", "token", "sha256", "expires"})
_SHA256: Final = re.compile(r"[0-9a-f]{64}\Z")
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+\Z")
"""What a bearer token may be made of (RFC 6750)."""

_log = logging.getLogger(__name__)


class Role(enum.IntEnum):
    """What a token is for; each role may do what those before it may."""

    VIEWER = 1
    OPERATOR = 2

    @property
    def word(self) -> str:
        """Its name in files and answers."""
        return self.name.lower()


class Actor(NamedTuple):
    """Who asks."""

    name: str
    role: Role


ANYBODY: Final = Actor("anybody", Role.OPERATOR)
"""Where no tokens are wanted."""


class TokenRefused(Exception):
    """A token is unknown, or has expired; the message says which."""


class Token(NamedTuple):
    """One token. `expires` is in seconds since 1970; None: never."""

    actor: Actor
    digest: bytes
    expires: float | None


class Tokens:
    """All tokens.

    Args:
        path: the file; None: there is none.
        environ: where `MMCACHE_ADMIN_TOKENS` may be.

    Raises:
        ConfigError: the file or the variable is of no use. Later such a file is only logged and counted: the tokens
            that were read last go on.
    """

    def __init__(self, path: Path | None, environ: Mapping[str, str]) -> None:
        self._path = path
        text = environ.get(VARIABLE)
        self._fixed = [] if text is None else parse(text, f"environment variable {VARIABLE}")
        self.wanted = path is not None or text is not None
        """Whether anybody needs one."""
        self.broken = 0
        """How often the file was found to be of no use since the start."""
        self._lock = threading.Lock()
        self._version = None if path is None else version_of(path)
        self._looked_at = time.monotonic()
        self._read = [] if path is None else _read(path)

    def actor_of(self, token: str) -> Actor:
        """Whose token it is. Takes as long for any text. Raises TokenRefused."""
        self._look()
        digest = hashlib.sha256(token.encode()).digest()
        found: Token | None = None
        for known in (*self._fixed, *self._read):
            if hmac.compare_digest(known.digest, digest):
                found = known  # and on: where it stands does not show
        if found is None:
            raise TokenRefused("the token is not known")
        if found.expires is not None and time.time() >= found.expires:
            raise TokenRefused("the token has expired; ask for another one")
        return found.actor

    def _look(self) -> None:
        """Read the file again if it is another one; at most once a second."""
        with self._lock:
            if self._path is None or time.monotonic() < self._looked_at + _LOOK_EVERY_S:
                return
            self._looked_at = time.monotonic()
            version = version_of(self._path)
            if version == self._version:
                return
            self._version = version
            try:
                self._read = _read(self._path)
            except ConfigError as error:
                self.broken += 1
                _log.error("the tokens that were read last go on: %s", error)
            else:
                _log.info("read %d tokens from %s", len(self._read), self._path)


def parse(text: str, where: str) -> list[Token]:
    """The tokens of a file's text. Raises ConfigError; no message has a token in it."""
    try:
        entries = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: not YAML") from error
    if entries is None:
        entries = []
    if not isinstance(entries, list) or len(entries) > MAX_TOKENS:
        raise ConfigError(f"{where}: must be a list of at most {MAX_TOKENS} tokens")
    tokens = [_token(entry, f"{where}: token {number}") for number, entry in enumerate(entries, 1)]
    if len({token.digest for token in tokens}) < len(tokens):
        raise ConfigError(f"{where}: a token is given twice")
    return tokens


def _token(entry: object, where: str) -> Token:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a mapping with name, role, and token or sha256")
    if unknown := [name for name in entry if name not in _FIELDS]:
        raise ConfigError(f"{where}: {str(unknown[0])[:40]!r} is none of {', '.join(sorted(_FIELDS))}")
    name, role = entry.get("name"), entry.get("role")
    if not isinstance(name, str) or not 1 <= len(name) <= 128 or not name.isprintable():
        raise ConfigError(f"{where}: name must be 1 to 128 printable characters")
    words = [one.word for one in Role]
    if role not in words:
        raise ConfigError(f"{where} ({name}): role must be {' or '.join(words)}")
    return Token(
        Actor(name, Role[role.upper()]),
        _digest(entry, f"{where} ({name})"),
        _expiry(entry.get("expires"), f"{where} ({name})"),
    )


def _digest(entry: Mapping[str, object], where: str) -> bytes:
    token, sha256 = entry.get("token"), entry.get("sha256")
    if (token is None) == (sha256 is None):
        raise ConfigError(f"{where}: give either token or sha256")
    if token is None:
        if not isinstance(sha256, str) or not _SHA256.match(sha256):
            raise ConfigError(f"{where}: sha256 must be 64 lower-case hex digits, in quotes")
        return bytes.fromhex(sha256)
    fits = isinstance(token, str) and LEAST_TOKEN_CHARACTERS <= len(token) <= MAX_TOKEN_CHARACTERS
    if not isinstance(token, str) or not fits or not _TOKEN.match(token):
        raise ConfigError(
            f"{where}: token must be {LEAST_TOKEN_CHARACTERS} to {MAX_TOKEN_CHARACTERS} of A-Z a-z 0-9 . _ ~ + / = -; "
            "make one with: openssl rand -hex 32"
        )
    return hashlib.sha256(token.encode()).digest()


def _expiry(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError as error:
            raise ConfigError(f"{where}: expires must be a time such as 2027-01-31T00:00:00Z") from error
    if isinstance(value, datetime.datetime):  # which YAML makes of one without quotes
        return (value if value.tzinfo is not None else value.replace(tzinfo=datetime.timezone.utc)).timestamp()
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.timezone.utc).timestamp()
    raise ConfigError(f"{where}: expires must be a time such as 2027-01-31T00:00:00Z")


def _read(path: Path) -> list[Token]:
    return parse(read_private(path, _MAX_FILE_BYTES), str(path))
