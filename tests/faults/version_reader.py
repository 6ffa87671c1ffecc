"""A reader that computes on a miss: `version_reader.py JSON`. Its embeddings say which version of a key's content they
were made of, and at the end it says for each get when it began, of which key it was, and the version that it returned.

The versions are in a file that the test writes: eight bytes for each key. Nothing is computed but a read of that file.
"""

from __future__ import annotations

import json
import mmap
import random
import struct
import sys
import threading
import time
from pathlib import Path

import torch

from mmcache import EmbeddingKey, MMCache
from mmcache.control.channel import ControlChannel

torch.set_num_threads(1)


def key_of(number: int) -> EmbeddingKey:
    return EmbeddingKey("encoder", str(number % 5), f"item-{number}", tenant=f"tenant-{number % 2}")


def main() -> None:
    given = json.loads(sys.argv[1])
    if given["trusts_for_ever"]:  # the bug that the checker must catch
        ControlChannel.fresh = lambda self: self._link.last_view  # type: ignore[method-assign]
        sys.setswitchinterval(0.2)  # once continued, it reads before it hears of anything
    with Path(given["versions"]).open("rb") as file:
        versions = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    choose = random.Random(given["seed"])
    ending = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ending.set()), daemon=True).start()
    gets: list[tuple[float, int, int]] = []
    computed = 0
    with MMCache.connect(given["config"], pool_bytes=32 << 20, read_timeout=0.5) as cache:
        print("ready", flush=True)
        while not ending.is_set():
            number = choose.randrange(given["keys"])
            key = key_of(number)
            began = time.monotonic()
            found = cache.get(key)
            if found is not None:
                gets.append((began, number, int(found.tensor[0])))
                continue

            def compute(number: int = number) -> torch.Tensor:
                return torch.full((64,), struct.unpack_from("<q", versions, 8 * number)[0], dtype=torch.int64)

            cache.get_or_compute(key, compute, timeout=1.0)
            computed += 1
            time.sleep(0.001)
    print(json.dumps({"gets": gets, "computed": computed}), flush=True)


if __name__ == "__main__":
    main()
