"""`mmcache up` processes as fixtures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from up_process import Up


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts an `mmcache up` in `tmp_path/state`; what still runs at the end is killed."""
    with contextlib.ExitStack() as stack:

        def start(*options: str, **environ: str) -> Up:
            process = Up(tmp_path / "state", *options, **environ)
            stack.callback(process.close)
            return process

        yield start


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One that is up, for tests that only look at it. The environment around it points elsewhere."""
    process = Up(
        tmp_path_factory.mktemp("up") / "state",
        MMCACHE_CONFIG="/nowhere/mmcache.yaml",
        MMCACHE_STORE__MASTER="192.0.2.1:9",
        MMCACHE_CONTROL__ADDRESS="tcp://192.0.2.1:9",
        MMCACHE_CONTROLLER__BIND="tcp://192.0.2.1:9",
        MMCACHE_CONTROLLER__SESSION_TTL="2s",
    )
    try:
        process.wait_ready()
        yield process
    finally:
        process.close()
