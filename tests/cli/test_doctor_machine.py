"""The doctor's checks of a machine, on made-up facts: what fails, what is only worth knowing, and what to do."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest

from mmcache.cli.doctor import machine
from mmcache.cli.doctor.finding import Finding, Status

GIB = 1 << 30
POOL = 256 << 20


def shows(finding: Finding, status: Status, *words: str) -> None:
    assert finding.status is status, finding
    text = f"{finding.detail} {finding.advice}"
    assert all(word in text for word in words), text
    assert bool(finding.advice) == (status is not Status.OK), finding


def test_kernel() -> None:
    shows(machine.kernel("Linux", "6.1.0-13-amd64"), Status.OK, "6.1.0")
    shows(machine.kernel("Linux", "4.4.0-generic"), Status.WARNING, "upgrade")
    shows(machine.kernel("Linux", "weird"), Status.WARNING)
    shows(machine.kernel("Darwin", "23.0"), Status.FAILING, "Linux only")


def test_clock() -> None:
    def forbidden() -> float:
        raise OSError(errno.EPERM, "Operation not permitted")

    shows(machine.clock(lambda: 7200.0), Status.OK, "2.0 h")
    shows(machine.clock(forbidden), Status.FAILING, "Operation not permitted", "clock_gettime")
    shows(machine.clock(), Status.OK)


def test_memory_is_what_the_container_allows_of_what_the_machine_has() -> None:
    shows(machine.memory(8 * GIB, None, POOL), Status.OK, "8 GiB available", "256 MiB")
    shows(machine.memory(POOL - 1, None, POOL), Status.FAILING, "Lower client.pool_bytes")
    shows(machine.memory(8 * GIB, 128 << 20, POOL), Status.FAILING, "128 MiB", "container")
    shows(machine.memory(8 * GIB, POOL, POOL), Status.OK)


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "1073741824\n", GIB),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "1073741824\n", GIB),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("nothing", "", None),
    ],
)
def test_the_containers_limit_is_read_as_either_version_writes_it(
    tmp_path: Path, name: str, text: str, limit: int | None
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert machine.container_limit(tmp_path) == limit


def test_shared_memory() -> None:
    shows(machine.shared_memory(POOL, POOL), Status.OK)
    shows(machine.shared_memory(64 << 20, POOL), Status.WARNING, "64 MiB in /dev/shm", "--shm-size")
    shows(machine.shared_memory(None, POOL), Status.WARNING, "no /dev/shm")


def test_open_files() -> None:
    shows(machine.open_files(65536, 65536), Status.OK, "65536")
    shows(machine.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY), Status.OK, "unlimited")
    shows(machine.open_files(1024, resource.RLIM_INFINITY), Status.WARNING, "1024", "unlimited", "ulimit -n")


def test_memlock_matters_to_rdma_alone() -> None:
    shows(machine.memlock(8 << 20, POOL, "tcp"), Status.OK, "8 MiB", "tcp")
    shows(machine.memlock(8 << 20, POOL, "rdma"), Status.FAILING, "ulimit -l unlimited")
    shows(machine.memlock(POOL, POOL, "rdma"), Status.OK)
    shows(machine.memlock(resource.RLIM_INFINITY, POOL, "rdma"), Status.OK, "unlimited")


def test_huge_pages_matter_when_mooncake_is_told_to_use_them() -> None:
    some = "HugePages_Total:      16\nHugePages_Free:       4\nHugepagesize:       2048 kB\n"
    none = some.replace("16", "0").replace("4\n", "0\n")
    asked = {"MC_STORE_USE_HUGEPAGE": "1"}
    shows(machine.huge_pages(none, {}), Status.OK, "not asked for")
    shows(machine.huge_pages(some, asked), Status.OK, "16 of 2048 kB reserved, 4 free")
    shows(machine.huge_pages(none, asked), Status.FAILING, "vm.nr_hugepages")
    shows(machine.huge_pages(none, {"MC_STORE_USE_HUGEPAGE": "0"}), Status.OK)
    shows(machine.huge_pages("", asked), Status.FAILING)


def test_rdma_devices() -> None:
    shows(machine.rdma({}, "tcp", ""), Status.OK, "none", "tcp")
    shows(machine.rdma({"mlx5_0": True}, "rdma", ""), Status.OK, "mlx5_0 (active)")
    shows(machine.rdma({}, "rdma", ""), Status.FAILING, "/dev/infiniband")
    shows(machine.rdma({"mlx5_0": True}, "rdma", "mlx5_0, mlx5_7"), Status.FAILING, "names mlx5_7")
    shows(machine.rdma({"mlx5_0": False, "mlx5_1": True}, "rdma", "mlx5_0"), Status.FAILING, "no port is active")


def test_rdma_devices_are_read_from_sysfs(tmp_path: Path) -> None:
    assert machine.infiniband_devices(tmp_path / "absent") == {}
    for device, state in (("mlx5_1", "4: ACTIVE\n"), ("mlx5_0", "1: DOWN\n")):
        (tmp_path / device / "ports" / "1").mkdir(parents=True)
        (tmp_path / device / "ports" / "1" / "state").write_text(state)
    assert machine.infiniband_devices(tmp_path) == {"mlx5_0": False, "mlx5_1": True}


def test_sizes_are_told_in_units() -> None:
    assert [machine.size(nbytes) for nbytes in (0, 1023, 1536, POOL, 3 << 40, 5 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "256 MiB",
        "3 TiB",
        "5120 TiB",
    ]
