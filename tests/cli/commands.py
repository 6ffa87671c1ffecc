"""Runs our commands in this process: importing torch for each would take longer than all that is tested."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from mmcache.cli.main import app

KEY = ("--model", "encoder", "--version", "1")


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.out)
        return parsed


def run(*arguments: str | Path, config: str | Path | None = None, **environ: str | None) -> Ran:
    """One command; of the settings, only those given here."""
    variables = {"MMCACHE_CONFIG": None if config is None else str(config), **environ}
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=variables)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


def safetensors_bytes(header: dict[str, Any] | bytes, payload: bytes = b"") -> bytes:
    """A safetensors file, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def one_tensor(dtype: str = "F32", nbytes: int = 16, shape: list[int] | None = None) -> dict[str, Any]:
    """The header of a file with one tensor."""
    return {"embedding": {"dtype": dtype, "shape": [4] if shape is None else shape, "data_offsets": [0, nbytes]}}
