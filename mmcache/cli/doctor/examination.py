"""Which checks there are: of the machine always, of the cluster where there is a configuration."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil

from mmcache.cli.doctor import machine, network, software
from mmcache.cli.doctor.finding import Check, Finding, Status, examine
from mmcache.config import Settings

RETRY_S: Final = 0.5
"""Between two looks at a cluster that does not serve yet."""
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - looked at, not written to


def machine_checks(settings: Settings) -> Iterator[Check]:
    """Hardware, kernel, limits; `settings` say what is needed of them."""
    pool_bytes, protocol = settings.client.pool_bytes, settings.store.protocol
    yield Check("kernel", lambda: machine.kernel(platform.system(), platform.release()))
    yield Check("clock", machine.clock)
    yield Check(
        "memory",
        lambda: machine.memory(psutil.virtual_memory().available, machine.container_limit(), pool_bytes),
    )
    yield Check("shared memory", lambda: machine.shared_memory(_shared_memory_total(), pool_bytes))
    yield Check("open files", lambda: machine.open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)))
    yield Check(
        "memlock", lambda: machine.memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], pool_bytes, protocol)
    )
    yield Check("huge pages", lambda: machine.huge_pages(Path("/proc/meminfo").read_text(), os.environ))
    yield Check("RDMA devices", lambda: machine.rdma(machine.infiniband_devices(), protocol, settings.store.devices))


def _shared_memory_total() -> int | None:
    return shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None


def software_checks() -> Iterator[Check]:
    """Python, torch, Mooncake; what is imported, is imported in a child."""
    children_s = software.CHILD_TIMEOUT_S + 5.0
    torch = None

    def look_at_torch() -> Finding:
        nonlocal torch
        torch = software.run_python(software.TORCH_STATEMENT)
        return software.torch(torch)

    def look_for_gpus() -> Finding:
        sees = torch is not None and torch.status == 0 and not torch.output.strip().endswith(" 0")
        return software.gpu(software.list_gpus(), sees)

    yield Check("python", lambda: software.python(sys.version_info[:2], platform.python_version()))
    yield Check("mmcache", software.versions)
    yield Check("torch", look_at_torch, children_s)
    yield Check("GPU", look_for_gpus, children_s)
    yield Check(
        "mooncake wheel",
        lambda: software.wheel(
            software.installed_wheels(), software.tested_versions(importlib.metadata.requires("mmcache") or ())
        ),
    )
    yield Check("shared libraries", software.libraries)
    yield Check("mooncake import", lambda: software.extension(software.run_python("import mooncake.store")), children_s)


def network_checks(settings: Settings, *, seconds_left: Callable[[], float] | None = None) -> Iterator[Finding]:
    """Findings of the cluster, one after another; the probe runs only where it can succeed.

    Args:
        settings: where the parts are.
        seconds_left: bounds what each of them may take besides its own deadline.
    """

    def bounded(seconds: float) -> float:
        return seconds if seconds_left is None else max(0.05, min(seconds, seconds_left()))

    def look(name: str, check: Callable[[float], Finding], seconds: float, rounds: int = 1) -> Finding:
        timeout = bounded(seconds)  # of each of its rounds; a second more for what is not bounded by itself
        return examine(Check(name, lambda: check(timeout), rounds * timeout + 1.0))

    store = settings.store
    findings = [
        look(
            "master",
            lambda timeout: network.mooncake_process("master", store.master, "store.master", timeout=timeout),
            network.ANSWER_S,
            rounds=2,
        )
    ]
    yield findings[-1]
    if store.sidecar is not None and store.attach != "embedded":
        sidecar = store.sidecar
        findings.append(
            look(
                "sidecar",
                lambda timeout: network.mooncake_process("sidecar", sidecar, "store.sidecar", timeout=timeout),
                network.ANSWER_S,
                rounds=2,
            )
        )
        yield findings[-1]
    controller = look(
        "controller",
        lambda timeout: network.controller_of(settings.control, timeout=timeout),
        network.ANSWER_S,
        rounds=2,
    )
    yield controller
    if seconds_left is not None:  # as long as it fails, the probe would only cost time
        findings.append(controller)
    yield look("master metrics", lambda timeout: network.metrics(store.metrics, timeout=timeout), network.ANSWER_S)
    silent = [finding.name for finding in findings if finding.status is Status.FAILING]
    if silent:
        yield network.unchecked("put and read", f"no answer from the {' and the '.join(silent)}")
        return
    yield look(
        "put and read",
        lambda timeout: network.store(network.run_probe(settings, timeout=timeout), settings),
        network.PROBE_S,
    )


def wait_for_cluster(
    settings: Settings, seconds: float, *, progress: Callable[[str], None]
) -> tuple[list[Finding], float]:
    """Look at the cluster again and again until nothing fails, or `seconds` are over.

    Returns the last findings, and how long it took.
    """
    started = time.monotonic()
    deadline = started + seconds
    while True:
        findings = []
        for finding in network_checks(settings, seconds_left=lambda: deadline - time.monotonic()):
            findings.append(finding)
            if finding.status is Status.FAILING:
                waited_s = time.monotonic() - started
                progress(f"waited {waited_s:.0f} of {seconds:g} s; {finding.name}: {finding.detail}")
        left = deadline - time.monotonic()
        if left <= 0 or not any(finding.status is Status.FAILING for finding in findings):
            return findings, time.monotonic() - started
        time.sleep(min(RETRY_S, left))
