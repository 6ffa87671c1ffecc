"""Tasks for processes of their own: `worker.py TASK JSON-ARGUMENTS`, with MMCACHE_CONFIG set."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from mmcache import EmbeddingKey, MMCache

torch.set_num_threads(1)


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def wait() -> None:
    sys.stdin.readline()


def key_of(number: int) -> EmbeddingKey:
    return EmbeddingKey("encoder", "1", f"item-{number}")


def embedding_of(number: int) -> torch.Tensor:
    """What the encoder makes of an item: different for each, the same in every process."""
    return torch.full((64, 128), float(number)) + torch.arange(128)


def compute_all(*, keys: int, seed: int, batch: int, stall_after: int | None = None, seconds: float = 0.0) -> None:
    """Ask for all keys in an order of our own; say which we computed. After `stall_after` computations, hang."""
    computed: list[int] = []
    order = list(range(keys))
    random.Random(seed).shuffle(order)

    def compute(some: Sequence[EmbeddingKey]) -> list[torch.Tensor]:
        numbers = [int(key.mm_hash.removeprefix("item-")) for key in some]
        if stall_after is not None and len(computed) >= stall_after:
            tell(stalled=True, computed=computed, computing=numbers)
            wait()
        computed.extend(numbers)
        time.sleep(seconds)
        return [embedding_of(number) for number in numbers]

    with MMCache.connect() as cache:
        tell(ready=True)
        wait()
        started = time.monotonic()
        embeddings = cache.get_or_compute_many([key_of(number) for number in order], compute, batch=batch)
        seconds = time.monotonic() - started
        wrong = [n for n, e in zip(order, embeddings, strict=True) if not torch.equal(e.tensor, embedding_of(n))]
        tell(computed=computed, wrong=wrong, seconds=seconds, stats=cache.stats())


def large_embedding(megabytes: int) -> torch.Tensor:
    """One whose every value is different, so that no part of it looks like another."""
    return torch.arange(megabytes << 18, dtype=torch.float32)


def compute_large(*, megabytes: int) -> None:
    """Compute one large entry under a claim, and publish it."""
    with MMCache.connect(pool_bytes=(megabytes + 4) << 20) as cache:
        tell(ready=True)
        wait()
        embedding = cache.get_or_compute(key_of(0), lambda: large_embedding(megabytes))
        tell(source=embedding.source, stats=cache.stats())


if __name__ == "__main__":
    {"compute_all": compute_all, "compute_large": compute_large}[sys.argv[1]](**json.loads(sys.argv[2]))
