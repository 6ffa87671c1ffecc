"""Shared by all tests: this folder on the path, hypothesis without clocks, and one real store for those that do not
break it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

# Hypothesis judges what is right here, not how fast this machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from cluster import MooncakeProcesses


@pytest.fixture(scope="session")
def mooncake() -> Iterator[MooncakeProcesses]:
    """A master and one owner of 256 MB on loopback."""
    from cluster import MooncakeProcesses

    with MooncakeProcesses() as processes:
        processes.start_master()
        processes.start_owner(256 << 20)
        yield processes
