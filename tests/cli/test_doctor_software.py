"""The doctor's checks of what is installed, on made-up facts and made-up children."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from test_doctor_machine import shows

from mmcache.cli.doctor import software
from mmcache.cli.doctor.children import Ended, run_child
from mmcache.cli.doctor.finding import Check, Status, examine, ok

CPU, CUDA = "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"
TESTED = {CPU: "0.3.13.post1", CUDA: "0.3.13.post1"}


def test_python() -> None:
    shows(software.python((3, 10), "3.10.1"), Status.OK)
    shows(software.python((3, 9), "3.9.1"), Status.FAILING, "3.10 to 3.13")
    shows(software.python((3, 99), "3.99.0"), Status.WARNING, "Not tested yet")


def test_wheels() -> None:
    shows(software.wheel({CPU: "0.3.13.post1"}, TESTED), Status.OK, "as tested")
    shows(software.wheel({}, TESTED), Status.FAILING, "none is installed", "pip install 'mmcache[cpu]'")
    shows(software.wheel({CUDA: "0.4"}, TESTED), Status.WARNING, "0.4", "0.3.13.post1", "mmcache[cuda12]")
    both = {CPU: "0.3.13.post1", CUDA: "0.3.13.post1"}
    shows(software.wheel(both, TESTED), Status.FAILING, f"pip uninstall {CPU} {CUDA}")


def test_the_tested_versions_are_those_of_our_own_requirements() -> None:
    import importlib.metadata

    tested = software.tested_versions(importlib.metadata.requires("mmcache") or [])
    assert tested.keys() == software.WHEELS.keys()
    assert software.wheel(software.installed_wheels(), tested).status is Status.OK


def test_every_missing_library_is_named_with_its_package() -> None:
    def load(name: str) -> None:
        if name in ("libibverbs.so.1", "libnuma.so.1"):
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    shows(software.libraries(load), Status.FAILING, "libnuma.so.1", "apt-get install libibverbs1 libnuma1")
    shows(software.libraries(lambda _: None), Status.OK)


@pytest.mark.parametrize(
    ("ended", "status", "words"),
    [
        (Ended(0, ""), Status.OK, ()),
        (Ended(None, ""), Status.FAILING, ("did not end in time",)),
        (Ended(1, "ModuleNotFoundError: No module named 'mooncake'"), Status.FAILING, ("mmcache[cpu]",)),
        (
            Ended(1, "ImportError: librdmacm.so.1: cannot open shared object file: No such file"),
            Status.FAILING,
            ("librdmacm.so.1 is missing", "apt-get install librdmacm1"),
        ),
        (
            Ended(1, "ImportError: libcuda.so.1: cannot open shared object file: No such file"),
            Status.FAILING,
            ("libcuda.so.1", "mmcache[cpu]"),
        ),
        (
            Ended(1, "ImportError: libfoo-2.so.3: cannot open shared object file: No such file"),
            Status.FAILING,
            ("libfoo-2.so.3 is missing", "apt-file"),
        ),
        (Ended(1, "ImportError: undefined symbol: x"), Status.FAILING, ("undefined symbol", "--force-reinstall")),
        (Ended(-11, ""), Status.FAILING, ("it said nothing",)),
    ],
)
def test_why_the_extension_cannot_be_imported(ended: Ended, status: Status, words: tuple[str, ...]) -> None:
    shows(software.extension(ended), status, *words)


def test_torch_and_gpus() -> None:
    shows(software.torch(Ended(0, "some warning\n2.13.0+cpu 0")), Status.OK, "2.13.0+cpu, sees 0 GPUs")
    shows(software.torch(Ended(1, "No module named 'torch'")), Status.FAILING, "No module named 'torch'", "pip install")
    shows(software.torch(Ended(None, "")), Status.FAILING, "did not end in time")
    shows(software.gpu(None, torch_sees=False), Status.OK, "none is needed")
    shows(software.gpu(Ended(0, "H200, 570.1"), torch_sees=True), Status.OK, "H200")
    shows(software.gpu(Ended(0, "H200, 570.1"), torch_sees=False), Status.WARNING, "torch sees none", "CPU build")
    shows(software.gpu(Ended(9, "couldn't communicate with the driver"), torch_sees=False), Status.WARNING, "driver")
    shows(software.gpu(Ended(None, ""), torch_sees=False), Status.WARNING, "did not end in time")


def test_a_child_that_hangs_is_killed_at_its_deadline_and_leaves_nothing(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; pwd; exec sleep 600"
    for timeout in (1.0, 4.0, 16.0):  # the first is enough unless the machine is very busy
        ended = run_child(["/bin/sh", "-c", script], timeout=timeout)
        if (tmp_path / "pid").exists():
            break
    assert ended.status is None
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not Path(ended.output.strip()).exists()


def test_a_child_gets_the_files_and_variables_that_it_is_given_and_none_of_our_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MMCACHE_STORE__MASTER", "192.0.2.1:9")
    program = "import os; print(open('a.txt').read(), os.environ['B'], 'MMCACHE_STORE__MASTER' in os.environ)"
    assert run_child([sys.executable, "-c", program], timeout=20, files={"a.txt": "text"}, B="b") == Ended(
        0, "text b False"
    )


def test_a_check_that_hangs_or_fails_is_a_finding() -> None:
    started = time.monotonic()
    hung = examine(Check("slow", lambda: time.sleep(60) or ok("slow", ""), patience_s=0.05))
    assert time.monotonic() - started < 30
    shows(hung, Status.FAILING, "did not answer within 0.05 s")
    shows(examine(Check("broken", lambda: 1 / 0)), Status.WARNING, "ZeroDivisionError", "report it")
    assert examine(Check("fine", lambda: ok("fine", "yes"))) == ok("fine", "yes")
