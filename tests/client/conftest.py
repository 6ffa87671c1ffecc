"""One cluster for the tests that do not break it; this folder on the path, for `worker`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from serving import Serving

_shared: list[Serving] = []


@pytest.fixture(scope="session")
def serving() -> Iterator[Serving]:
    """A cluster whose sidecar lends 256 MiB. Tests must use keys of their own."""
    from serving import Serving

    with Serving() as serving:
        _shared.append(serving)
        yield serving


@pytest.fixture(scope="module", autouse=True)
def caches_end_with_their_module() -> Iterator[None]:
    """All tests share one process, whose descriptors have an end."""
    yield
    for serving in _shared:
        serving.close_caches()


@pytest.fixture
def fresh_serving() -> Iterator[Serving]:
    """A cluster for one test, which may break it."""
    from serving import Serving

    with Serving() as serving:
        yield serving
