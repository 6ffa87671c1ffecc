"""CURVE keys as text, and in files. 32 bytes are 40 characters of Z85 (ZeroMQ RFC 32).

    # the clients of this controller
    Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID encoder-3

One key a line, and behind it what it is called. A comment begins with `#`, as no key does: it would be over 32 bits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from mmcache.errors import ConfigError
from mmcache.private_file import read_guarded, read_private

CHARACTERS: Final = 40
MAX_KEYS: Final = 10_000
MAX_NAME_CHARACTERS: Final = 128
MAX_FILE_BYTES: Final = 1 << 20
_ALPHABET: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_KEY: Final = re.compile(f"[{re.escape(_ALPHABET)}]{{{CHARACTERS}}}")


def is_key(text: str) -> bool:
    """Whether these are 32 bytes in Z85."""
    if _KEY.fullmatch(text) is None:
        return False
    return all(_number(text[at : at + 5]) < 1 << 32 for at in range(0, CHARACTERS, 5))


def _number(digits: str) -> int:
    number = 0
    for digit in digits:
        number = number * 85 + _ALPHABET.index(digit)
    return number


def parse_keys(text: str, where: str) -> dict[str, str]:
    """What each key of a file's text is called, perhaps nothing. Raises ConfigError; no message has a key in it."""
    keys: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split(maxsplit=1)
        if not words or words[0].startswith("#"):
            continue
        name = words[1].rstrip() if len(words) > 1 else ""
        if not is_key(words[0]):
            raise ConfigError(
                f"{where}, line {number}: must begin with a key, {CHARACTERS} characters of Z85 as `mmcache keys new` "
                "writes them; or be a comment, which begins with #"
            )
        if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
            raise ConfigError(f"{where}, line {number}: the name must be {MAX_NAME_CHARACTERS} printable characters")
        keys[words[0]] = name
        if len(keys) > MAX_KEYS:
            raise ConfigError(f"{where}: has more than {MAX_KEYS:,} keys")
    return keys


def read_keys(path: Path, setting: str) -> dict[str, str]:
    """The keys of a file that anybody may read and nobody else may write to. Raises ConfigError."""
    where = f"{setting}: {path}"
    return parse_keys(read_guarded(path, MAX_FILE_BYTES, 0o022, "others can write to it; chmod go-w", where), where)


def read_secret_key(path: Path, setting: str) -> str:
    """The one key of a file that nobody else may read. Raises ConfigError."""
    where = f"{setting}: {path}"
    keys = list(parse_keys(read_private(path, MAX_FILE_BYTES, where), where))
    if len(keys) != 1:
        raise ConfigError(f"{where}: must have one key, not {len(keys)}; `mmcache keys new` makes such a file")
    return keys[0]
