"""An entry's metadata and a safetensors file's, neither lost in the other.

An entry has plain data, a file has texts by name (`__metadata__`). What a file said of itself becomes the entry's
`safetensors`, and goes back into a file from there. All other metadata of the entry is in a file as one text: the JSON
under `mmcache.meta`, which `put` reads again. (JSON has no bytes: they become base64 text.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeGuard

import msgspec

from mmcache.cli.errors import InputError

OF_THE_FILE: Final = "safetensors"
"""Where an entry's metadata holds the file's own."""
OF_THE_ENTRY: Final = "mmcache.meta"
"""Where a file's metadata holds the entry's."""


def parse_options(options: Sequence[str]) -> dict[str, object]:
    """Metadata from `--meta NAME=JSON`. Raises InputError."""
    meta: dict[str, object] = {}
    for option in options:
        name, separator, text = option.partition("=")
        if not separator or not name:
            raise InputError(f"--meta {option}: must be NAME=JSON, such as --meta 'grid_thw=[1, 24, 24]'")
        if name in meta:
            raise InputError(f"--meta {name} is given twice")
        if name == OF_THE_FILE:
            raise InputError(f"--meta {name}: this name is for the file's own metadata; take another")
        try:
            meta[name] = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            hint = f"text needs quotes of its own: --meta '{name}=\"text\"'"
            raise InputError(f"--meta {name}: {text[:80]!r} is not JSON ({error}); {hint}") from error
    return meta


def meta_of_file(metadata: Mapping[str, str], path: object) -> dict[str, object]:
    """What a file's metadata is in an entry. Raises InputError."""
    own = dict(metadata)
    text = own.pop(OF_THE_ENTRY, "{}")
    try:
        meta = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"{path}: {OF_THE_ENTRY} in its metadata is no JSON object: {error}") from error
    return {**meta, OF_THE_FILE: own} if own else meta


def metadata_for_file(meta: Mapping[str, object]) -> dict[str, str]:
    """What an entry's metadata is in a file."""
    own = meta.get(OF_THE_FILE)
    if not _is_a_files_own(own):
        return {OF_THE_ENTRY: msgspec.json.encode(meta).decode()} if meta else {}
    rest = {name: value for name, value in meta.items() if name != OF_THE_FILE}
    return {**own, OF_THE_ENTRY: msgspec.json.encode(rest).decode()} if rest else dict(own)


def _is_a_files_own(value: object) -> TypeGuard[dict[str, str]]:
    return (
        isinstance(value, dict)
        and bool(value)
        and OF_THE_ENTRY not in value
        and all(isinstance(text, str) for text in value.values())
    )
