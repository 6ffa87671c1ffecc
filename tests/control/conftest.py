"""A channel with a fresh session at a scripted controller."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_controller import Stage, stage


@pytest.fixture
def staged() -> Iterator[Stage]:
    with stage() as opened:
        yield opened
