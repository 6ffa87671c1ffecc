"""The machine: kernel, clock, memory, limits, devices. Each check takes the facts, so that a test can make them up."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from mmcache.cli.doctor.finding import Finding, failing, ok, warning

MIN_OPEN_FILES: Final = 4096
_CGROUP_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")  # version 2, version 1
_MIN_KERNEL: Final = (4, 18)


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def kernel(system: str, release: str) -> Finding:
    """Linux, and not older than what is tested against."""
    if system != "Linux":
        return failing("kernel", f"{system} {release}", "mmcache runs on Linux only.")
    numbers = tuple(int(part) for part in release.partition("-")[0].split(".")[:2] if part.isdecimal())
    if numbers < _MIN_KERNEL:
        return warning("kernel", f"Linux {release}", "Older than 4.18, which nobody tests: upgrade the kernel.")
    return ok("kernel", f"Linux {release}")


def clock(read: Callable[[], float] | None = None) -> Finding:
    """CLOCK_BOOTTIME, by which sessions and leases count time that includes suspension."""
    try:
        seconds = read() if read is not None else time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError) as error:
        advice = "Sessions need it: run on Linux, outside sandboxes that forbid clock_gettime."
        return failing("clock", f"CLOCK_BOOTTIME cannot be read: {error}", advice)
    return ok("clock", f"CLOCK_BOOTTIME is there (up for {seconds / 3600:.1f} h)")


def memory(available: int, limit: int | None, pool_bytes: int) -> Finding:
    """Memory for the pool. `limit` is the control group's, None without one; all in bytes."""
    usable = available if limit is None else min(available, limit)
    detail = f"{size(usable)} available{'' if limit is None else f' (the container may have {size(limit)})'}"
    detail += f"; client.pool_bytes is {size(pool_bytes)}"
    if usable < pool_bytes:
        return failing("memory", detail, "Lower client.pool_bytes, or give the machine or container more memory.")
    return ok("memory", detail)


def container_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory that this container may have in bytes; None where there is no limit to be seen."""
    for name in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            limit = int((root / name).read_text())
            return limit if limit < 1 << 60 else None  # version 1 writes a huge number for none
    return None


def shared_memory(total: int | None, pool_bytes: int) -> Finding:
    """`/dev/shm`; `total` is its size in bytes, None where it is not there."""
    name = "shared memory"
    advice = (
        "The pool itself is an anonymous memory file, which this does not limit, but segments in shared memory and the"
        " workers of data loaders take from it: docker run --shm-size, or an emptyDir of medium Memory."
    )
    if total is None:
        return warning(name, "there is no /dev/shm", advice)
    detail = f"{size(total)} in /dev/shm; client.pool_bytes is {size(pool_bytes)}"
    return warning(name, detail, advice) if total < pool_bytes else ok(name, detail)


def open_files(soft: int, hard: int) -> Finding:
    """The limit of open files."""
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return ok("open files", f"limit {_limit(soft)}")
    advice = "A controller needs one for each session, Mooncake several for each peer: ulimit -n 65536 (LimitNOFILE)."
    return warning("open files", f"limit {soft}, and {_limit(hard)} at most", advice)


def memlock(soft: int, pool_bytes: int, protocol: str) -> Finding:
    """The limit of locked memory in bytes, which RDMA takes the pool from."""
    name, detail = "memlock", f"limit {'unlimited' if soft == resource.RLIM_INFINITY else size(soft)}"
    if soft == resource.RLIM_INFINITY or soft >= pool_bytes:
        return ok(name, detail)
    if protocol != "rdma":
        return ok(name, f"{detail}: too little to register the pool for RDMA, and store.protocol is {protocol}")
    advice = "ulimit -l unlimited (LimitMEMLOCK=infinity; in Docker --ulimit memlock=-1)."
    return failing(name, f"{detail}; client.pool_bytes is {size(pool_bytes)}, and RDMA locks all of it", advice)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def huge_pages(meminfo: str, environ: Mapping[str, str]) -> Finding:
    """Huge pages that are reserved, which Mooncake takes segments from if it is told to; `meminfo` is /proc's."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    total, free = (int(fields.get(f"HugePages_{word}", "0")) for word in ("Total", "Free"))
    detail = f"{total} of {fields.get('Hugepagesize', '?').strip()} reserved, {free} free"
    wanted = environ.get("MC_STORE_USE_HUGEPAGE", "0") not in ("", "0")
    if wanted and not free:
        advice = "Reserve some (sysctl vm.nr_hugepages), or do not set MC_STORE_USE_HUGEPAGE."
        return failing("huge pages", f"{detail}, but MC_STORE_USE_HUGEPAGE is set", advice)
    return ok("huge pages", detail if wanted else f"{detail}; not asked for")


def infiniband_devices(root: Path = Path("/sys/class/infiniband")) -> dict[str, bool]:
    """RDMA devices by name, and whether a port of each is active."""
    if not root.is_dir():
        return {}
    return {
        device.name: any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state"))
        for device in sorted(root.iterdir())
    }


def rdma(devices: Mapping[str, bool], protocol: str, configured: str) -> Finding:
    """RDMA devices, and whether each is active; `configured` is store.devices."""
    name = "RDMA devices"
    listed = ", ".join(f"{device} ({'active' if up else 'down'})" for device, up in devices.items()) or "none"
    if protocol != "rdma":
        return ok(name, f"{listed}; store.protocol is {protocol}")
    advice = "Load the adapter's driver, give the container /dev/infiniband, or set store.protocol to tcp."
    if not devices:
        return failing(name, "none, but store.protocol is rdma", advice)
    wanted = [device.strip() for device in configured.split(",") if device.strip()] or list(devices)
    absent = [device for device in wanted if device not in devices]
    if absent:
        return failing(name, f"{listed}; store.devices names {', '.join(absent)}", "Correct store.devices.")
    if not any(devices[device] for device in wanted):
        return failing(name, f"{listed}: no port is active", "Bring the link up: ibstat, ip link.")
    return ok(name, listed)
