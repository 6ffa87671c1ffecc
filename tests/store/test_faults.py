"""Mooncake when its processes die or hang, and what the store makes of it. Each test has a store of its own."""

from __future__ import annotations

import ctypes
import http.client
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import writer
from buffers import Buffers, fresh, soon
from cluster import MooncakeProcesses, Owner, wait_until
from stores import mooncake_store

from mmcache.errors import StoreUnavailable
from mmcache.store.base import Outcome, PutResult, ReadResult

KINDS = ("sidecar", "embedded")
MIB = 1 << 20


def shared_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem")]
    return int(line.split()[1]) * 1024


@pytest.fixture
def processes() -> Iterator[MooncakeProcesses]:
    """A master that forgets dead owners in two seconds, a sidecar without memory of its own, and a remote owner."""
    with MooncakeProcesses() as processes:
        processes.start_master(options=("--client_ttl=2",))
        processes.start_owner(0)
        processes.start_owner(64 * MIB)
        yield processes


@pytest.fixture
def remote(processes: MooncakeProcesses) -> Owner:
    return processes.owners[1]


def is_in_progress(processes: MooncakeProcesses, name: str) -> bool:
    connection = http.client.HTTPConnection(processes.metrics, timeout=5)
    with closing(connection):
        connection.request("GET", f"/batch_query_keys?keys={name}")
        return b"REPLICA_IS_NOT_READY" in connection.getresponse().read()


@contextmanager
def writer_in_mid_put(processes: MooncakeProcesses, kind: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """Another process's put, begun and held up by the stopped owner that is to take its bytes."""
    master, sidecar, remote = processes.master, *processes.owners
    command = [sys.executable, writer.__file__, master.address, sidecar.address, kind, name, str(8 * MIB)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            with remote.stopped():
                process.stdin.write("put\n")
                process.stdin.flush()
                wait_until(lambda: is_in_progress(processes, name), timeout=10, what="the start of the put")
                yield process
        finally:
            process.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_of_a_writer_killed_in_mid_put_is_in_progress(processes: MooncakeProcesses, kind: str) -> None:
    name = fresh()
    with writer_in_mid_put(processes, kind, name) as killed:
        (killed if kind == "embedded" else processes.owners[0]).kill()
    with closing(mooncake_store(processes, "embedded")) as store:
        region = Buffers(store, 16 * MIB)
        assert region.put({name: b"mine"}) == [PutResult(Outcome.IN_PROGRESS)]
        assert region.read(name, 8 * MIB)[0] == ReadResult(Outcome.IN_PROGRESS)
        assert store.exists([name], deadline=soon()) == [False]


def test_a_sidecar_finishes_the_put_of_an_engine_that_was_killed(processes: MooncakeProcesses) -> None:
    name = fresh()
    with closing(mooncake_store(processes, "embedded")) as store:
        region = Buffers(store, 16 * MIB)
        with writer_in_mid_put(processes, "sidecar", name) as killed:
            killed.kill()
            assert region.put({name: b"mine"}) == [PutResult(Outcome.IN_PROGRESS)]
        wait_until(lambda: store.exists([name], deadline=soon())[0], timeout=10, what="the end of the put")
        region.assert_readable(name, bytes([writer.BYTE]) * 8 * MIB)


@pytest.mark.parametrize("kind", KINDS)
def test_reads_from_a_killed_owner_fail_until_the_master_forgets_it(
    processes: MooncakeProcesses, remote: Owner, kind: str
) -> None:
    name, content = fresh(), b"x" * MIB
    with closing(mooncake_store(processes, kind)) as store:
        region = Buffers(store, 16 * MIB)
        region.put({name: content})
        region.assert_readable(name, content)
        remote.kill()
        address = region.take(MIB)
        seen: list[Outcome] = []

        def is_forgotten() -> bool:
            seen.append(store.read_into([name], [address], [MIB], deadline=soon())[0].outcome)
            return seen[-1] is Outcome.NOT_FOUND

        wait_until(is_forgotten, timeout=20, what="the end of the owner's lease of life")
        assert set(seen) == {Outcome.TRANSFER_FAILED, Outcome.NOT_FOUND}
        assert region.put({fresh(): content}) == [PutResult(Outcome.NO_SPACE)], "nobody lends memory any more"


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_master_is_unavailable_at_once_and_found_again(processes: MooncakeProcesses, kind: str) -> None:
    name = fresh()
    with closing(mooncake_store(processes, kind)) as store:
        region = Buffers(store, 16 * MIB)
        region.put({name: b"x" * 4096})
        processes.master.kill()
        started = time.monotonic()
        results = [region.read(name, 4096)[0] for _ in range(5)]
        assert {result.outcome for result in results} == {Outcome.UNAVAILABLE}
        assert time.monotonic() - started < 3, "each call after the first takes Mooncake more than four seconds"
        assert all(result.settled for result in results[1:]), "memory was lent to a call that could not succeed"
        assert region.put({name: b"x" * 4096}) == [PutResult(Outcome.UNAVAILABLE)]
        assert store.remove([name], deadline=soon()) == [Outcome.UNAVAILABLE]
        assert store.exists([name], deadline=soon()) == [False]
        assert store.sizes([name], deadline=soon()) == [None]
        processes.restart(processes.master)
        wait_until(
            lambda: region.read(name, 4096)[0].outcome is Outcome.NOT_FOUND, timeout=20, what="the master's return"
        )


def test_a_sidecar_that_dies_is_unavailable_at_once_and_found_again(processes: MooncakeProcesses) -> None:
    sidecar = processes.owners[0]
    with closing(mooncake_store(processes, "sidecar")) as store:
        region = Buffers(store, 16 * MIB)
        region.put({fresh(): b"x"})
        sidecar.kill()
        results = [region.read("absent", 16)[0] for _ in range(20)]
        assert {result.outcome for result in results} == {Outcome.UNAVAILABLE}
        assert [result.settled for result in results] == [False] + [True] * 19
        wait_until(lambda: store._binding.health_check() != 0, timeout=20, what="a ping that fails")
        processes.restart(sidecar)
        name = fresh()
        wait_until(
            lambda: region.put({name: b"again"})[0].outcome is Outcome.OK, timeout=20, what="the sidecar's return"
        )
        region.assert_readable(name, b"again")


def test_memory_that_a_dead_sidecar_cannot_share_is_given_back(processes: MooncakeProcesses) -> None:
    """Mooncake touches every page of what it allocates, and never unmaps it."""
    with closing(mooncake_store(processes, "sidecar")) as store:
        before = shared_bytes()
        processes.owners[0].kill()
        with pytest.raises(StoreUnavailable):
            store.allocate_region(MIB)
        assert shared_bytes() < before + MIB // 2


def test_a_sidecar_restarted_too_quickly_to_be_noticed_is_given_up(processes: MooncakeProcesses) -> None:
    sidecar = processes.owners[0]
    with closing(mooncake_store(processes, "sidecar")) as store:
        region = Buffers(store, 16 * MIB)
        name = fresh()
        region.put({name: b"before"})
        sidecar.kill()
        processes.restart(sidecar)
        targets = [region.take(6) for _ in range(2)]

        def recovers_or_raises() -> bool:
            results = store.read_into([name, "absent"], targets, [6, 6], deadline=soon())
            if results[0].outcome is Outcome.OK:  # a ping fell into the gap after all
                return True
            assert {result.outcome for result in results} == {Outcome.UNAVAILABLE}, "not taken for missing or too small"
            return False

        with suppress(StoreUnavailable):
            wait_until(recovers_or_raises, timeout=20, what="the end of this attachment")
    with closing(mooncake_store(processes, "sidecar")) as anew:
        Buffers(anew, 4096).assert_readable(name, b"before")


@pytest.mark.parametrize(
    ("patience", "outcome"),
    [({}, Outcome.TRANSFER_FAILED), ({"MC_TCP_PROGRESS_TIMEOUT_SEC": "60"}, Outcome.UNAVAILABLE)],
    ids=["5 s: the sidecar gives up first", "60 s: our call to it gives up after 30 s"],
)
def test_memory_of_a_read_from_an_owner_that_hangs_is_never_settled(patience: dict[str, str], outcome: Outcome) -> None:
    nbytes = 8 * MIB
    with MooncakeProcesses() as processes:
        processes.start_master()
        processes.start_owner(0, environment={**patience, "MC_TCP_STATUS_TIMEOUT_SEC": "60"} if patience else {})
        remote = processes.start_owner(64 * MIB)
        with closing(mooncake_store(processes, "sidecar")) as store:
            region = Buffers(store, 64 * MIB)
            name = fresh()
            assert region.put({name: b"o" * nbytes}) == [PutResult(Outcome.OK)]
            neighbours = region.filled(b"n" * MIB), region.take(nbytes), region.filled(b"n" * MIB)
            with remote.stopped():
                result = store.read_into([name], [neighbours[1]], [nbytes], deadline=soon())[0]
                assert result == ReadResult(outcome, 0, settled=False)
                handed_out_meanwhile = region.filled(b"m" * nbytes)
            wait_until(lambda: served_again(region, remote), timeout=20, what="the owner's return")
            assert ctypes.string_at(handed_out_meanwhile, nbytes) == b"m" * nbytes
            for neighbour in (neighbours[0], neighbours[2]):
                assert ctypes.string_at(neighbour, MIB) == b"n" * MIB


def served_again(region: Buffers, remote: Owner) -> bool:
    """A put and a read through the sidecar, from the one owner of memory."""
    assert remote.alive
    name = fresh()
    if region.put({name: b"again"})[0].outcome is not Outcome.OK:
        return False
    return region.read(name, 5) == (ReadResult(Outcome.OK, 5), b"again")
