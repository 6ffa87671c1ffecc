"""A process that puts one object of 0x57 bytes when it is told to, so that a test can kill it meanwhile.

`python writer.py MASTER SIDECAR KIND NAME NBYTES`: prints `ready`, waits for a line, puts, prints the outcome.
"""

from __future__ import annotations

import ctypes
import sys
import time

from mmcache.store.mooncake import MooncakeStore

BYTE = 0x57


def main() -> None:
    master, sidecar, kind, name, size = sys.argv[1:]
    nbytes = int(size)
    store = MooncakeStore.attach(master=master, sidecar=sidecar, attach=kind, region_bytes=nbytes)
    region = store.allocate_region(nbytes)
    ctypes.memset(region.address, BYTE, nbytes)
    print("ready", flush=True)
    sys.stdin.readline()
    print(store.put_from([name], [region.address], [nbytes], deadline=time.monotonic() + 30)[0], flush=True)


if __name__ == "__main__":
    main()
