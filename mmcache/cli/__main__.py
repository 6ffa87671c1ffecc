"""Where the `mmcache` command begins, and ends: also when it is interrupted, or nobody takes its output.

Imports next to nothing, so that Ctrl-C finds it ready.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

_READER_GONE: Final = 128 + signal.SIGPIPE
"""The status of a command whose reader has left (`mmcache … | head`), as a shell tells it of others."""


class _Output(io.FileIO):
    """Standard output, which remembers why it could not be written."""

    error: OSError | None = None

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            self.error = error
            raise


def main() -> NoReturn:
    """Run the command that the arguments name, and exit with its status."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)  # nothing has begun; what an exception makes of imports is hard to say
    from mmcache.cli.main import app  # noqa: PLC0415

    output = _watch_output()
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, before)
    try:
        try:
            app()
        finally:
            if output is not None:
                sys.stdout.flush()
    except (OSError, SystemExit):
        if output is None or output.error is None:
            raise
        _end_without_output(output.error)
    finally:
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, _end)
    sys.exit(0)


def _end(number: int, _: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def _watch_output() -> _Output | None:
    """Put an `_Output` in the place of `sys.stdout`; None where that is closed."""
    old = sys.stdout
    if not isinstance(old, io.TextIOWrapper):
        return None
    output = _Output(old.fileno(), "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(output),
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )
    return output


def _end_without_output(error: OSError) -> NoReturn:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    if error.errno == errno.EPIPE:
        sys.exit(_READER_GONE)
    sys.stderr.write(f"mmcache: cannot write the output: {error.strerror}\n")
    sys.exit(1)


if __name__ == "__main__":
    main()
