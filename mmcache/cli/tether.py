"""Becomes a command that dies with its parent: `tether.py PARENT_PID COMMAND…`, run by path, without mmcache.

The kernel sends it SIGKILL when the parent's thread that started it ends, however that ends, so not even a SIGKILL of
the parent leaves an orphan. It is set here, between fork and exec, since a `preexec_fn` would run Python in a forked
copy of a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>


def main() -> None:
    """Ties this process to its parent and executes the command; the process id stays."""
    parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"cannot tie {command[0]} to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # it ended before the tie held
        sys.exit(f"the parent of {command[0]} has ended")
    try:
        os.execv(command[0], command)  # noqa: S606 (no shell is wanted)
    except OSError as error:
        sys.exit(f"cannot execute {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
