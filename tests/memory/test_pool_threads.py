"""Many threads on a small pool: no block is shared, nobody waits for ever, and everything comes back."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from mmcache.errors import PoolExhausted
from mmcache.memory.host import tensor_maker
from mmcache.memory.pool import RegisteredPool

PAGE = 4096
THREADS = 6
ROUNDS = 300
NAMES = [f"name{number}" for number in range(8)]


def int64s(pool, block, nbytes: int) -> torch.Tensor:
    return tensor_maker(block, offset=0, dtype=torch.int64, shape=(nbytes // 8,))(pool.export(block))


class Worker:
    def __init__(self, pool: RegisteredPool, number: int) -> None:
        self.pool = pool
        self.number = number
        self.choose = random.Random(number)
        self.served = 0

    def run(self, begin: threading.Barrier) -> None:
        begin.wait()
        for round_number in range(ROUNDS):
            # What a round holds goes with it: threads that wait while they hold would wait for each other.
            self.round(self.number * ROUNDS + round_number)

    def round(self, stamp: int) -> None:
        sizes = [PAGE * self.choose.randint(1, 3) for _ in range(self.choose.randint(1, 2))]
        patience = self.choose.choice([0, 0.005, 60])
        try:
            blocks = self.pool.allocate_many(sizes, deadline=time.monotonic() + patience)
        except PoolExhausted:
            if patience == 60:
                raise
            return
        self.served += 1
        held = [self.fill(block, stamp) for block in blocks]
        for found in self.pool.find(self.choose.choices(NAMES, k=2)):
            if found is not None:
                held.append((found[0], int64s(self.pool, found[1].block, PAGE)[1::3]))
        if self.choose.random() < 0.1:
            self.pool.forget(self.choose.choice(NAMES))
        for expected, tensor in held:
            assert bool((tensor == expected).all()), "somebody else wrote here"

    def fill(self, block, stamp: int) -> tuple[int, torch.Tensor]:
        tensor = int64s(self.pool, block, block.nbytes).fill_(stamp)
        if self.choose.random() < 0.5:
            self.pool.release(block)
        else:
            entry = self.pool.keep(self.choose.choice(NAMES), block, stamp)
            self.pool.unhold(entry.block)
        return stamp, tensor[5:]


def test_threads_that_share_a_pool_never_share_a_block(make_pool):
    pool = make_pool(12)
    workers = [Worker(pool, number) for number in range(THREADS)]
    begin = threading.Barrier(THREADS)
    with ThreadPoolExecutor(THREADS) as threads:
        for outcome in [threads.submit(worker.run, begin) for worker in workers]:
            outcome.result(120)
    assert all(worker.served for worker in workers)
    pool.close()
    figures = pool.stats()
    assert (figures["used"], figures["held_blocks"], figures["waiters"]) == (0, 0, 0)
