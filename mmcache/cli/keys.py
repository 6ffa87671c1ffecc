"""`mmcache keys`: the keys by which controller and clients know each other."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from mmcache.cli.entries.keys import Json
from mmcache.cli.errors import InputError, reported
from mmcache.cli.signals import STOPS, orderly_end
from mmcache.errors import MMCacheError

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)

keys = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Keys by which a controller and its clients know each other, and their connections are encrypted (CURVE).",
)


@keys.callback()
def _group() -> None:
    """Without a callback, Typer makes of a group of one command that command itself."""


@keys.command()
def new(
    out: Annotated[Path, typer.Option(metavar="DIRECTORY", help="Where the files go.")] = Path(),
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What the files are called. Default: this host's name.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Make a pair of keys: NAME.public, which everybody may know, and NAME.secret, which only its owner may read.

    The controller needs one pair, and so does each client or host of clients. What is there is never overwritten.

    Exits with 0 if both files are there, 1 if not (and then neither is), 2 for a wrong option.
    """
    with reported("keys new"), orderly_end():
        label = socket.gethostname() if name is None else name
        if _NAME.fullmatch(label) is None:
            raise InputError(f"--name: {label!r} must be 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit")
        if not out.is_dir():
            raise InputError(f"--out: {out} is no directory")
        import zmq  # noqa: PLC0415 (`mmcache --help` needs none of it)

        public, secret = (key.decode() for key in zmq.curve_keypair())
        public_file, secret_file = out.absolute() / f"{label}.public", out.absolute() / f"{label}.secret"
        _write(
            {
                secret_file: (0o600, f"# The secret key of {label}: only who uses it may read it.\n{secret}\n"),
                public_file: (0o644, f"# The public key of {label}.\n{public} {label}\n"),
            }
        )
        if json_output:
            told = {"public_key": public, "public_key_file": str(public_file), "secret_key_file": str(secret_file)}
            typer.echo(json.dumps(told))
        else:
            typer.echo(_advice(public, public_file, secret_file))


def _write(files: dict[Path, tuple[int, str]]) -> None:
    """Make these files, with their modes, or none of them. Raises MMCacheError."""
    made: list[Path] = []
    with _uninterrupted():
        for path, (mode, text) in files.items():
            try:
                with open(path, "x", encoding="ascii", opener=functools.partial(os.open, mode=mode)) as file:
                    made.append(path)
                    os.fchmod(file.fileno(), mode)  # whatever the umask
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                for one in made:
                    one.unlink(missing_ok=True)
                if isinstance(error, FileExistsError):
                    raise MMCacheError(f"{path} is there already and stays: give another --name or --out") from error
                raise MMCacheError(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals that end a process wait until the end of the block, which takes a moment."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _advice(public: str, public_file: Path, secret_file: Path) -> str:
    secret = json.dumps(str(secret_file))  # as YAML takes it, whatever is in it
    return f"""\
{public_file}
{secret_file}  (nobody else may read it)

If they are the controller's: in its configuration, and in that of each client,
  controller: {{secret_key_file: {secret}, client_keys_file: FILE}}   # the clients' public keys, one a line
  control: {{controller_key: "{public}", secret_key_file: …}}

If they are a client's: in its configuration, and on the controller's machine, which needs no restart,
  control: {{controller_key: "…", secret_key_file: {secret}}}
  cat {shlex.quote(str(public_file))} >> FILE"""
