"""Tensors in safetensors files: read with nothing but safetensors, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mmcache.cli.errors import InputError
from mmcache.entry import DTYPE_BYTES
from mmcache.errors import InvalidEntry

_UNWRITABLE: Final = frozenset({"complex32", "complex128"})
"""What an entry may hold and no safetensors file; older releases lack more."""


class Contents(NamedTuple):
    """A file's tensors, in its order, and its own metadata."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]


def read(path: Path) -> Contents:
    """All tensors of a file. Raises InputError, which names the file and the tensor."""
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: _read_tensor(file, name, path) for name in file.keys()}  # noqa: SIM118 - no mapping
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: cannot be read as a safetensors file: {error}") from error
    if not tensors:
        raise InputError(f"{path}: holds no tensors, so there is nothing to publish")
    return Contents(tensors, metadata)


def check_regular(path: Path) -> None:
    """Raise InputError for what is no file; reading a pipe would wait for its writer."""
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if not path.is_file():
        raise InputError(f"{path}: is not a file")


def _read_tensor(file: safe_open, name: str, path: Path) -> torch.Tensor:
    try:
        tensor: torch.Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
    except (SafetensorError, KeyError, AttributeError) as error:  # the last two: a torch without that dtype
        raise InputError(f"{path}: tensor {name!r} cannot be read: {error}") from error
    if str(tensor.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        raise InputError(f"{path}: tensor {name!r} is of {tensor.dtype}, which an entry cannot hold")
    return tensor


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file so that a reader sees all of it, or what was there before.

    Raises:
        InvalidEntry: a tensor is of a dtype that no safetensors file holds; nothing was written.
        InputError: the file cannot be written.
    """
    for name, tensor in tensors.items():
        if str(tensor.dtype).removeprefix("torch.") in _UNWRITABLE:
            raise InvalidEntry(f"tensor {name!r} is of {tensor.dtype}, which a safetensors file cannot hold")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            draft.touch()
            mode = draft.stat().st_mode  # as the user's umask has it
            save_file(dict(tensors), draft, metadata=dict(metadata) or None)
            draft.chmod(mode)  # which safetensors takes from everybody else
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except KeyError as error:
        raise InvalidEntry(f"a tensor is of {error}, which this release of safetensors cannot write") from error
    except (OSError, SafetensorError) as error:
        raise InputError(f"--output {path}: cannot be written: {error}") from error
