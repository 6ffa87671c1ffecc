"""The same policies as plainly as can be: lists that are searched, no bounds on time."""

from __future__ import annotations

import math

from mmcache.controller.eviction.policy import MOST_PASSED_OVER


class LruModel:
    """All models know sizes, and what is aside."""

    def __init__(self) -> None:
        self.sizes: dict[bytes, int] = {}
        self.aside: set[bytes] = set()
        self.order: list[bytes] = []

    def insert(self, name: bytes, nbytes: int, cost_ms: float) -> None:
        known = name in self.sizes
        self.sizes[name] = nbytes
        if known:
            self.access(name, 1)
        else:
            self.order.append(name)

    def access(self, name: bytes, count: int) -> None:
        if name in self.sizes and name not in self.aside and count > 0:
            self.order.remove(name)
            self.order.append(name)

    def remove(self, name: bytes) -> None:
        del self.sizes[name]
        self.aside.discard(name)
        self.order.remove(name)

    def choose(self) -> bytes | None:
        victim = next((name for name in self.order if name not in self.aside), None)
        if victim is not None:
            self.aside.add(victim)
        return victim

    def put_back(self, name: bytes) -> None:
        self.aside.remove(name)
        self.order.remove(name)
        self.order.append(name)


class S3FifoModel(LruModel):
    """`order` is the small queue, then the main one: an entry is in the main one if it is in `main`."""

    MOST_USES = 3
    GHOSTS = 1

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[bytes, int] = {}
        self.main: set[bytes] = set()
        self.ghosts: list[tuple[bytes | None, int]] = []
        self.fills_main = True

    def insert(self, name: bytes, nbytes: int, cost_ms: float) -> None:
        known = name in self.sizes
        self.sizes[name] = nbytes
        self.value(name, cost_ms)
        if known:
            self.access(name, 1)
            return
        small, both = self.queued()
        self.order.append(name)
        self.uses[name] = 0
        left = [ghost for ghost, _ in self.ghosts]
        if name in left:
            place = left.index(name)
            self.ghosts[place] = (None, self.ghosts[place][1])
            self.promote(name)
        elif self.fills_main and small > 0.1 * both:
            self.promote(name)

    def queued(self) -> tuple[int, int]:
        names = [name for name in self.order if name not in self.aside]
        return sum(self.sizes[name] for name in names if name not in self.main), sum(map(self.sizes.__getitem__, names))

    def value(self, name: bytes, cost_ms: float) -> None:
        pass

    def access(self, name: bytes, count: int) -> None:
        if name in self.sizes:
            self.uses[name] = min(self.uses[name] + max(count, 0), self.MOST_USES)

    def remove(self, name: bytes) -> None:
        nbytes = self.sizes[name]
        super().remove(name)
        if name in self.main:
            self.main.remove(name)
        else:
            self.ghosts.append((name, nbytes))
        while self.ghosts and (
            len(self.ghosts) > self.GHOSTS * len(self.sizes)
            or sum(nbytes for _, nbytes in self.ghosts) > self.GHOSTS * 0.9 * sum(self.sizes.values())
        ):
            self.ghosts.pop(0)

    def choose(self) -> bytes | None:
        for passed in range(MOST_PASSED_OVER + 1):
            small = [name for name in self.order if name not in self.main and name not in self.aside]
            main = [name for name in self.order if name in self.main and name not in self.aside]
            small_bytes, main_bytes = (sum(self.sizes[name] for name in names) for names in (small, main))
            last = passed == MOST_PASSED_OVER
            victim = None
            if main and small_bytes <= 0.1 * (small_bytes + main_bytes):
                victim = self.from_main(main, last)
            elif not small:
                return None
            elif last or not self.stays(small[0]):
                victim = small[0]
            else:
                self.promote(small[0])
            if victim is not None:
                self.aside.add(victim)
                self.fills_main = False
                return victim
        raise AssertionError

    def stays(self, name: bytes) -> bool:
        return self.uses[name] >= 2

    def promote(self, name: bytes) -> None:
        self.uses[name] = 0
        self.to_main(name)

    def to_main(self, name: bytes) -> None:
        self.main.add(name)
        self.order.remove(name)
        self.order.append(name)

    def from_main(self, main: list[bytes], last: bool) -> bytes | None:
        if last or not self.uses[main[0]]:
            return main[0]
        self.uses[main[0]] -= 1
        self.to_main(main[0])
        return None


class S3CostModel(S3FifoModel):
    """Ranks are numbers, and the least goes; among equals the one that was ranked first."""

    MOST_USES = 3
    GHOSTS = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight: dict[bytes, int] = {}
        self.rank: dict[bytes, tuple[int, int, int]] = {}
        self.age = 0
        self.median: float | None = None
        self.fills_main = False
        self.ranked = 0

    def value(self, name: bytes, cost_ms: float) -> None:
        self.weight[name] = 0
        if math.isfinite(cost_ms) and cost_ms > 0:
            density = math.log2(min(max(cost_ms, 1e-3), 3.6e6) / self.sizes[name])
            self.median = density if self.median is None else self.median
            self.weight[name] = min(max(round(density - self.median), -4), 4)
            self.median += 1 / 64 if density > self.median else -1 / 64

    def access(self, name: bytes, count: int) -> None:
        super().access(name, count)
        if name in self.main and name not in self.aside and count > 0:
            self.rank_anew(name)

    def stays(self, name: bytes) -> bool:
        return self.uses[name] >= 1

    def promote(self, name: bytes) -> None:
        self.uses[name] = max(self.uses[name], 1)
        self.to_main(name)
        self.rank_anew(name)

    def put_back(self, name: bytes) -> None:
        super().put_back(name)
        if name in self.main:
            self.rank_anew(name)

    def rank_anew(self, name: bytes) -> None:
        self.ranked += 1
        power = 4 + self.weight[name] + int(math.log2(self.uses[name]))
        self.rank[name] = (self.age + 2**power, power, self.ranked)

    def from_main(self, main: list[bytes], last: bool) -> bytes | None:
        victim = min(main, key=self.rank.__getitem__)
        self.age = max(self.age, self.rank[victim][0])
        return victim


MODELS = {"lru": LruModel, "s3fifo": S3FifoModel, "s3cost": S3CostModel}
