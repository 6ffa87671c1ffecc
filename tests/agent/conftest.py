"""One cluster for the tests that do not break it; this folder on the path, for `engines`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from engines import ServedEngine
    from serving import Serving


@pytest.fixture(scope="session")
def serving() -> Iterator[Serving]:
    """A cluster whose sidecar lends 256 MiB. Tests must use keys of their own."""
    from serving import Serving

    with Serving() as serving:
        yield serving


@pytest.fixture
def fresh_serving() -> Iterator[Serving]:
    """A cluster for one test, which may break it."""
    from serving import Serving

    with Serving() as serving:
        yield serving


@pytest.fixture(scope="session")
def pair_served(serving: Serving) -> Iterator[list[ServedEngine]]:
    from engines import ServedEngine

    with ServedEngine(serving) as one, ServedEngine(serving) as other:
        yield [one, other]


@pytest.fixture
def engines(pair_served: list[ServedEngine]) -> Iterator[list[ServedEngine]]:
    """Two, on one cluster, with nothing under way. What they count is counted since the session's first test."""
    yield pair_served
    for engine in pair_served:
        engine.forget_all()
