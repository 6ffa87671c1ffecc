"""The parts of a benchmark's cluster can be stopped, killed and started again, alone and together."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.parts import PARTS, Parts, free_ports
from mmcache.store.launch import rpc_answers


def test_parts_fail_and_come_back_on_their_ports() -> None:
    with Parts(owner_bytes=32 << 20, sidecar_bytes=0) as parts:
        assert set(parts.parts) == set(PARTS)
        before = parts.sidecar.pid
        parts.sidecar.kill()
        assert not parts.sidecar.alive
        assert not parts.sidecar.ready
        parts.sidecar.start()
        assert parts.sidecar.pid != before
        assert rpc_answers(parts.sidecar.address)
        with parts.owner.stopped():
            assert psutil.Process(parts.owner.pid).status() == psutil.STATUS_STOPPED
            assert not parts.owner.ready
        assert parts.owner.ready


def test_whatever_failed_is_healed_and_everything_ends() -> None:
    with Parts(owner_bytes=32 << 20, sidecar_bytes=0) as parts:
        for part in parts.parts.values():
            part.kill()
        parts.sidecar.launch()
        parts.sidecar.stop()
        parts.heal()
        assert all(part.ready for part in parts.parts.values())
        pids = [part.pid for part in parts.parts.values()]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20
