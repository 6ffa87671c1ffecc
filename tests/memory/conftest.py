from __future__ import annotations

from collections.abc import Callable

import pytest

from mmcache.memory.host import HostMemory
from mmcache.memory.pool import RegisteredPool

PAGE = 4096
MakePool = Callable[..., RegisteredPool]


@pytest.fixture
def make_pool() -> MakePool:
    def make(pages: int, **options: int) -> RegisteredPool:
        memory = HostMemory(pages * PAGE)
        return RegisteredPool(memory.address, memory.nbytes, owner=memory.mapping, **options)

    return make
