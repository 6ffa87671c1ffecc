"""What a single setting may hold: text, endpoints, choices, flags, counts, sizes and durations, each within bounds.

A kind checks a value as YAML gives it and returns it normalised (sizes in bytes, durations in float seconds). Its
`BadValue` reads on after the setting's name.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

import msgspec
import yaml

from mmcache.curve import CHARACTERS, is_key

_DAY: Final = 86_400.0

_SIZE_UNITS: Final = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_DURATION_UNITS: Final = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_URL: Final = re.compile(
    r"https?://(?:\[([0-9A-Fa-f:.]+)\]|[A-Za-z0-9][A-Za-z0-9._-]*)(?::([0-9]{1,5}))?(?:/[A-Za-z0-9._~/-]*)?", re.ASCII
)
_PERCENT: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%", re.ASCII)
_QUANTITY: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]+)", re.ASCII)


class BadValue(ValueError):
    """A value that a setting cannot hold."""


def parse_size(text: str) -> int:
    """Bytes in `64MiB` or `1.5 GB`. Raises BadValue, also for a number without a unit."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in _SIZE_UNITS:
        raise BadValue(f"must be bytes or a size such as 64MiB or 1GB, not {show(text)}")
    number = float(match[1]) if "." in match[1] else int(match[1])
    nbytes = number * _SIZE_UNITS[match[2]]
    if nbytes != int(nbytes):
        raise BadValue(f"must be a whole number of bytes, not {show(text)}")
    return int(nbytes)


def parse_duration(text: str) -> float:
    """Seconds in `500ms`, `2s`, `5min` or `1h`. Raises BadValue, also for a number without a unit."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in _DURATION_UNITS:
        raise BadValue(f"must be a duration such as 2 (seconds) or 500ms, not {show(text)}")
    return float(match[1]) * _DURATION_UNITS[match[2]]


def show(value: object) -> str:
    """A value in an error message: short, on one line."""
    if isinstance(value, (dict, yaml.MappingNode)):
        return "a mapping"
    if isinstance(value, (list, yaml.SequenceNode)):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


class Kind(msgspec.Struct, frozen=True):
    """The base of all kinds; an `optional` one may be null, which is None."""

    optional: bool = False

    def check(self, value: object) -> object:
        """The value, normalised. Raises BadValue."""
        return None if value is None and self.optional else self._check(value)

    def check_text(self, text: str) -> object:
        """The same for text from the environment, which means what it would mean in the file."""
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise BadValue(f"is set to no plain value: {show(text)}") from error
        return self.check(value)

    def _check(self, value: object) -> object:
        raise NotImplementedError


class Text(Kind, frozen=True):
    """Printable text."""

    max_length: int = 128
    empty: bool = False

    def check_text(self, text: str) -> object:
        """Text needs no quotes in the environment; empty is null where that is allowed."""
        return self.check(None if self.optional and not text else text)

    def _check(self, value: object) -> str:
        if not isinstance(value, str):
            raise BadValue(f"must be text, not {show(value)}; in a file, quote it")
        if not value and not self.empty:
            raise BadValue("must not be empty")
        if len(value) > self.max_length:
            raise BadValue(f"has {len(value)} characters; at most {self.max_length} are allowed")
        if not value.isprintable():
            raise BadValue(f"must be printable, not {show(value)}")
        return value


class Endpoint(Text, frozen=True):
    """`HOST:PORT`, an IPv6 host in brackets; with a scheme in front where it has one."""

    max_length: int = 300
    scheme: str = ""
    lowest_port: int = 1

    def _check(self, value: object) -> str:
        text = super()._check(value)
        pattern = re.escape(self.scheme) + r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})"
        match = re.fullmatch(pattern, text, re.ASCII)
        if match is None or not self.lowest_port <= int(match[1]) <= 65_535:
            form = f"{self.scheme}HOST:PORT with a port of {self.lowest_port} to 65535"
            raise BadValue(f"must be {form}, not {show(text)}")
        return text


class Url(Text, frozen=True):
    """`http://HOST:PORT`, or https, with the beginning of a path where it has one; without a slash at its end.

    ASCII only, so that it looks like no other one, and without credentials, which belong into files.
    """

    max_length: int = 300

    def _check(self, value: object) -> str:
        text = super()._check(value)
        if "@" in text:
            raise BadValue("must be a URL without credentials: tokens are in files")
        match = _URL.fullmatch(text)
        if match is None or not _is_address(match[1]) or not 1 <= int(match[2] or 80) <= 65_535:
            raise BadValue(f"must be http://HOST:PORT or https://HOST:PORT, not {show(text)}")
        return text.rstrip("/")


class Urls(Kind, frozen=True):
    """A list of URLs, each once."""

    most: int = 256

    def _check(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)):
            raise BadValue(f"must be a list of URLs, not {show(value)}")
        if len(value) > self.most:
            raise BadValue(f"has {len(value)} URLs; at most {self.most} are allowed")
        url = Url()
        return tuple(dict.fromkeys(url._check(one) for one in value))


def _is_address(text: str | None) -> bool:
    """Whether it is of IPv6; None, a host's name, is let through."""
    try:
        return text is None or bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


class CurveKey(Text, frozen=True):
    """A public key of CURVE, in Z85."""

    def _check(self, value: object) -> str:
        if not isinstance(value, str) or not is_key(value):  # it is not shown: it may be a secret one by mistake
            raise BadValue(f"must be a public key as `mmcache keys new` prints it: {CHARACTERS} characters, in quotes")
        return value


class Choice(Kind, frozen=True):
    """One of a few words."""

    words: tuple[str, ...] = ()

    def _check(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise BadValue(f"must be {' or '.join(self.words)}, not {show(value)}")
        return value


class Flag(Kind, frozen=True):
    """True or false; in the environment also 1 or 0."""

    def check_text(self, text: str) -> object:
        """As for any kind, and 1 and 0, which is what people write there."""
        return {"1": True, "0": False}[text] if text in ("1", "0") else super().check_text(text)

    def _check(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise BadValue(f"must be true or false, not {show(value)}")
        return value


class Count(Kind, frozen=True):
    """A whole number within bounds, both included."""

    least: int = 1
    most: int = 1 << 31

    def _check(self, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadValue(f"must be a whole number, not {show(value)}")
        if not self.least <= value <= self.most:
            raise BadValue(f"must be {self.least:,} to {self.most:,}, not {show(value)}")
        return value


class Size(Count, frozen=True):
    """Bytes, as a number or with a unit."""

    most: int = 1 << 44

    def _check(self, value: object) -> int:
        return super()._check(parse_size(value) if isinstance(value, str) else value)


class Duration(Kind, frozen=True):
    """Seconds, as a number or with a unit; at most a day."""

    least: float = 0.001
    most: float = _DAY

    def _check(self, value: object) -> float:
        seconds = parse_duration(value) if isinstance(value, str) else value
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
            raise BadValue(f"must be a duration such as 2 (seconds) or 500ms, not {show(value)}")
        if not self.least <= seconds <= self.most:  # nor is NaN
            raise BadValue(f"must be {self.least:g} to {self.most:g} seconds, not {show(value)}")
        return float(seconds)


class Share(Kind, frozen=True):
    """A part of a whole: more than 0, or `least`, at most 1; or with a percent sign, at most 100%."""

    least: float | None = None

    def _check(self, value: object) -> float:
        share = value
        if isinstance(value, str) and (match := _PERCENT.fullmatch(value.strip())) is not None:
            share = float(match[1]) / 100
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not self._is_within(share):
            least = "more than 0" if self.least is None else f"{self.least:g} or more"
            raise BadValue(f"must be {least} and at most 1, or a percentage such as 90%, not {show(value)}")
        return float(share)

    def _is_within(self, share: float) -> bool:
        return share <= 1 and (share > 0 if self.least is None else share >= self.least)
