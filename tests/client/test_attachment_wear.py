"""An attachment is replaced as often as its memory wears out, but never while too many old clients have yet to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from mmcache.client import attachment
from mmcache.client.attachment import MAX_ENDING, Attacher, Attachment
from mmcache.metrics import Counters
from mmcache.store.memory import MemoryStore, MemoryWorld
from tests.serving import wait_until

PAGE = 4096


class Lingering(MemoryStore):
    """Does not end before it is allowed to."""

    may_end = False
    closed: ClassVar[list[Lingering]] = []
    """As a thread that ends it would, this knows it meanwhile."""

    def close(self) -> None:
        super().close()
        self.closed.append(self)

    @property
    def ended(self) -> bool:
        return self.may_end and super().ended


@pytest.fixture
def attacher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Attacher]:
    monkeypatch.setattr(attachment, "SHORTEST_LIFE_SECONDS", 0.0)
    monkeypatch.setattr(attachment, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(Lingering, "may_end", False)
    monkeypatch.setattr(Lingering, "closed", [])
    world = MemoryWorld()
    attacher = Attacher(lambda: Lingering(world), pool_bytes=8 * PAGE, counters=Counters())
    attacher.start(5.0)
    yield attacher
    attacher.close(5.0)


def wear_out(attacher: Attacher) -> Attachment:
    worn = attacher.require()
    for _ in range(3):
        attacher.give_back(worn, worn.pool.allocate(PAGE, deadline=0.0), settled=False)
    return worn


def test_memory_wears_out_any_number_of_times(attacher: Attacher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lingering, "may_end", True)
    for _ in range(3 * MAX_ENDING):
        worn = wear_out(attacher)
        wait_until(lambda worn=worn: attacher.current not in (None, worn), timeout=20, what="fresh memory")


def test_no_more_clients_than_a_bound_are_left_to_end_and_the_next_is_replaced_once_they_have(
    attacher: Attacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(MAX_ENDING):
        worn = wear_out(attacher)
        wait_until(lambda worn=worn: attacher.current not in (None, worn), timeout=20, what="fresh memory")
    worn = wear_out(attacher)
    assert attacher._count_ending() == MAX_ENDING
    assert attacher._worn_out is worn
    assert attacher.current is worn
    monkeypatch.setattr(Lingering, "may_end", True)
    wait_until(lambda: attacher.current not in (None, worn), timeout=20, what="fresh memory")
