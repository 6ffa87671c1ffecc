"""Runs a command until it ends, or until its own stdin does: then it kills the command and all that it has started.

`vllm serve` starts processes that outlive it when it is killed; whoever runs it may be killed as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import subprocess
import sys

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>: orphans among its descendants become its children


def main() -> None:
    """Keep one."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    ended, _, _ = select.select([0, os.pidfd_open(command.pid)], [], [])
    if 0 not in ended:
        sys.exit(command.wait())
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1.0)


if __name__ == "__main__":
    main()
