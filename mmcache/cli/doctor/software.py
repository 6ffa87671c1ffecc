"""What is installed: Python, torch, Mooncake's wheel, and the shared libraries that it needs."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from mmcache.cli.doctor.children import Ended, run_child
from mmcache.cli.doctor.finding import Finding, failing, ok, warning
from mmcache.control.messages import PROTOCOL_VERSION

WHEELS: Final = {
    "mooncake-transfer-engine-non-cuda": "cpu",
    "mooncake-transfer-engine": "cuda12",
    "mooncake-transfer-engine-cuda13": "cuda13",
}
"""Distributions of Mooncake, which all have the same files, and the extra of ours that installs each."""
LIBRARIES: Final = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""What the extension loads and no wheel brings along, and its package in Debian and Ubuntu."""
TESTED_PYTHONS: Final = ((3, 10), (3, 13))
CHILD_TIMEOUT_S: Final = 60.0
_MISSING_LIBRARY: Final = re.compile(r"(lib[\w+.-]+\.so[\w.]*): cannot open shared object file")


def python(version: tuple[int, int], text: str) -> Finding:
    """The interpreter, `version` being its first two numbers."""
    least, most = TESTED_PYTHONS
    if version < least:
        return failing("python", text, "mmcache needs Python 3.10 to 3.13.")
    if version > most:
        return warning("python", text, "Not tested yet; 3.10 to 3.13 are.")
    return ok("python", text)


def versions() -> Finding:
    """This mmcache, and the protocol that it shares with the controller."""
    return ok("mmcache", f"{importlib.metadata.version('mmcache')}, control protocol {PROTOCOL_VERSION}")


def installed_wheels() -> dict[str, str]:
    """Version by name of the Mooncake distributions that are installed."""
    found = {}
    for name in WHEELS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def tested_versions(requirements: Sequence[str]) -> dict[str, str]:
    """Version by distribution of the Mooncake that this release was tested with, from its own requirements."""
    pinned = (re.match(r"(mooncake-transfer-engine[a-z0-9-]*)\s*==\s*([^\s;]+)", line) for line in requirements)
    return {match[1]: match[2] for match in pinned if match is not None}


def wheel(installed: Mapping[str, str], tested: Mapping[str, str]) -> Finding:
    """Exactly one of Mooncake's wheels, of the version that is tested."""
    name = "mooncake wheel"
    if not installed:
        advice = "pip install 'mmcache[cpu]' (or [cuda12], [cuda13], by the machine's CUDA)."
        return failing(name, "none is installed", advice)
    listed = ", ".join(f"{distribution} {version}" for distribution, version in installed.items())
    if len(installed) > 1:
        advice = f"They overwrite each other's files: pip uninstall {' '.join(installed)}, then install one of them."
        return failing(name, f"several are installed: {listed}", advice)
    [(distribution, version)] = installed.items()
    expected = tested.get(distribution, version)
    if version != expected:
        advice = f"Tested with {expected}: pip install 'mmcache[{WHEELS[distribution]}]'."
        return warning(name, listed, advice)
    return ok(name, f"{listed}, as tested")


def libraries(load: Callable[[str], object] = ctypes.CDLL) -> Finding:
    """The shared libraries that Mooncake's extension needs of the system."""
    name = "shared libraries"
    faults = {}
    for library in LIBRARIES:
        try:
            load(library)
        except OSError as error:
            faults[library] = str(error)
    if not faults:
        return ok(name, ", ".join(LIBRARIES))
    packages = " ".join(LIBRARIES[library] for library in faults)
    return failing(name, "; ".join(faults.values()), f"apt-get install {packages}")


def run_python(statement: str, *, timeout: float = CHILD_TIMEOUT_S) -> Ended:
    """What this interpreter says to a statement, in a process of its own."""
    return run_child([sys.executable, "-c", statement], timeout=timeout)


def extension(ended: Ended) -> Finding:
    """Whether Mooncake's extension could be imported, by what a child said that tried."""
    name = "mooncake import"
    if ended.status == 0:
        return ok(name, "mooncake.store can be imported")
    if ended.status is None:
        return failing(name, "did not end in time", "See what the import waits for: python -X importtime.")
    if "No module named" in ended.output:
        advice = "pip install 'mmcache[cpu]' (or [cuda12], [cuda13], by the machine's CUDA)."
        return failing(name, ended.last_lines, advice)
    missing = _MISSING_LIBRARY.search(ended.output)
    if missing is None:
        return failing(name, ended.last_lines, "Install the wheel anew: pip install --force-reinstall 'mmcache[cpu]'.")
    library = missing[1]
    if library.startswith(("libcuda", "libcudart")):
        return failing(name, f"{library} is missing", "Without a GPU: pip install 'mmcache[cpu]', and no CUDA wheel.")
    package = LIBRARIES.get(library)
    advice = f"apt-get install {package}" if package else f"Install the package that has {library}: apt-file search it."
    return failing(name, f"{library} is missing", advice)


TORCH_STATEMENT: Final = "import torch; print(torch.__version__, torch.cuda.device_count())"


def torch(ended: Ended) -> Finding:
    """Whether torch can be imported, by what a child said that tried; its version, and the GPUs that it sees."""
    if ended.status != 0:
        advice = "pip install torch, on a machine without a GPU from its index of CPU builds."
        return failing("torch", "did not end in time" if ended.status is None else ended.last_lines, advice)
    version, _, gpus = ended.output.strip().splitlines()[-1].partition(" ")
    return ok("torch", f"{version}, sees {gpus} GPU{'' if gpus == '1' else 's'}")


def gpu(listed: Ended | None, torch_sees: bool) -> Finding:
    """GPUs as nvidia-smi lists them, None where there is no nvidia-smi; none at all is fine."""
    if listed is None:
        return ok("GPU", "no nvidia-smi; entries lie in host memory, so none is needed")
    if listed.status != 0:
        detail = "nvidia-smi did not end in time" if listed.status is None else listed.last_lines
        return warning("GPU", detail, "Reload or reinstall the NVIDIA driver, if this machine is to use its GPU.")
    if not torch_sees:
        advice = "torch is a CPU build, or too new for the driver: install one for the driver's CUDA."
        return warning("GPU", f"{listed.last_lines}; torch sees none", advice)
    return ok("GPU", listed.last_lines)


def list_gpus(timeout: float = 10.0) -> Ended | None:
    """What nvidia-smi says; None where there is none."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return None
    return run_child([path, "--query-gpu=name,driver_version", "--format=csv,noheader"], timeout=timeout)
