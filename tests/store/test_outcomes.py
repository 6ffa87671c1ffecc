"""What codes mean, and when memory may be used again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

import pytest
from buffers import soon

from mmcache.store.base import Outcome, PutResult, ReadResult, Region
from mmcache.store.mooncake import MooncakeStore
from mmcache.store.outcomes import SLOW_S, has_settled, outcome_of


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (0, Outcome.OK),
        (4096, Outcome.OK),
        (-1, Outcome.FAILED),
        (-200, Outcome.NO_SPACE),
        (-600, Outcome.INVALID),
        (-601, Outcome.INVALID),
        (-703, Outcome.IN_PROGRESS),
        (-704, Outcome.NOT_FOUND),
        (-705, Outcome.OK),
        (-706, Outcome.LEASED),
        (-707, Outcome.LEASE_EXPIRED),
        (-800, Outcome.TRANSFER_FAILED),
        (-801, Outcome.CHECKSUM),
        (-900, Outcome.UNAVAILABLE),
        (-901, Outcome.UNAVAILABLE),
        (-1700, Outcome.QUOTA),
        (-1701, Outcome.QUOTA),
    ],
)
def test_every_code_that_mooncake_is_known_to_return_has_its_outcome(code: int, outcome: Outcome) -> None:
    assert outcome_of(code) is outcome


def test_an_unknown_code_is_a_failure_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert [outcome_of(-4711), outcome_of(-4711)] == [Outcome.FAILED] * 2
    assert [record.args for record in caplog.records] == [(-4711,)]


@pytest.mark.parametrize(
    ("outcome", "elapsed_s", "sidecar", "settled"),
    [
        (Outcome.UNAVAILABLE, 0.0, True, False),  # the sidecar may still be at it
        (Outcome.UNAVAILABLE, 30.0, True, False),
        (Outcome.UNAVAILABLE, 30.0, False, True),  # the master, before or after the transfer
        (Outcome.TRANSFER_FAILED, SLOW_S / 2, True, True),  # refused or reset
        (Outcome.TRANSFER_FAILED, SLOW_S * 2, True, False),
        (Outcome.TRANSFER_FAILED, SLOW_S * 2, False, False),
        (Outcome.LEASE_EXPIRED, 11.0, False, False),
        (Outcome.FAILED, SLOW_S * 2, False, False),
        (Outcome.NOT_FOUND, 30.0, True, True),  # beside one that hung, in one batch
        (Outcome.NO_SPACE, 30.0, True, True),
        (Outcome.OK, 30.0, True, True),
    ],
)
def test_memory_is_settled_only_when_no_transfer_can_touch_it(
    outcome: Outcome, elapsed_s: float, sidecar: bool, settled: bool
) -> None:
    assert has_settled(outcome, elapsed_s, sidecar=sidecar) is settled


class Script:
    """A binding whose transfers do what a test says. Only for what no real store can be made to do on demand."""

    def __init__(self, transfer: Callable[[], list[int]], exists: list[int]) -> None:
        self.transfer = transfer
        self.exists = exists
        self.closed = 0

    def health_check(self) -> int:
        return 0

    def batch_get_into(self, *_: object) -> list[int]:
        return self.transfer()

    def batch_put_from(self, *_: object) -> list[int]:
        return self.transfer()

    def batch_is_exist(self, *_: object) -> list[int]:
        return [self.exists.pop(0)] if self.exists else [0]

    def close(self) -> int:
        self.closed += 1
        return 0


def scripted(
    transfer: Callable[[], list[int]],
    *,
    exists: list[int] | None = None,
    kind: Literal["sidecar", "embedded"] = "embedded",
) -> tuple[MooncakeStore, Script]:
    script = Script(transfer, exists or [])
    store = MooncakeStore(script, kind=kind, peers=(), lease_s=10.0)  # type: ignore[arg-type]
    store._regions.append(Region(4096, 4096))
    return store, script


def explode() -> list[int]:
    raise RuntimeError("from C++")


def test_an_exception_of_the_binding_is_a_failure_that_never_settles() -> None:
    store, script = scripted(explode)
    assert store.read_into(["a"], [4096], [8], deadline=soon()) == [ReadResult(Outcome.FAILED, 0, settled=False)]
    store, script = scripted(explode)
    assert store.put_from(["a"], [4096], [8], deadline=soon()) == [PutResult(Outcome.FAILED, settled=False)]
    store.close()
    assert script.closed == 0, "memory that a transfer may still touch was unregistered"


def test_a_put_that_shows_up_late_is_confirmed() -> None:
    store, script = scripted(lambda: [0], exists=[0, 0, 1])
    assert store.put_from(["a"], [4096], [8], deadline=soon()) == [PutResult(Outcome.OK)]
    assert script.exists == []
    store.close()
    store.close()
    assert script.closed == 1


def test_a_put_that_never_shows_up_is_in_progress_by_its_deadline() -> None:
    store, _ = scripted(lambda: [0])
    started = time.monotonic()
    assert store.put_from(["a"], [4096], [8], deadline=started + 0.2) == [PutResult(Outcome.IN_PROGRESS)]
    assert time.monotonic() - started < 0.9


def test_a_put_whose_confirmation_fails_is_not_announced() -> None:
    store, _ = scripted(lambda: [0], exists=[-1], kind="sidecar")
    assert store.put_from(["a"], [4096], [8], deadline=soon()) == [PutResult(Outcome.UNAVAILABLE)]


def test_after_a_call_that_reached_nobody_memory_is_lent_only_when_a_probe_succeeds() -> None:
    calls = []

    def transfer() -> list[int]:
        calls.append(1)
        return [-900] if len(calls) == 1 else [8]

    store, _ = scripted(transfer, exists=[-1, 0], kind="sidecar")
    results = [store.read_into(["a"], [4096], [8], deadline=soon())[0] for _ in range(3)]
    assert results == [
        ReadResult(Outcome.UNAVAILABLE, 0, settled=False),
        ReadResult(Outcome.UNAVAILABLE, 0, settled=True),
        ReadResult(Outcome.OK, 8),
    ]
    assert len(calls) == 2
