"""What the files of a checkpoint say about its encoder, from bounded reads.

A digest of the weights covers the names and sizes of the files that vLLM would load and, of safetensors, their headers
(name, dtype, shape and place of each tensor) and up to 4 KiB from the middle of each tensor, so that a change of any
tensor's values as a whole is a change of the digest. Past 8,192 tensors those with like names (the experts of a layer)
are sampled evenly. Files of other formats are sampled evenly too, from first to last byte. So no more than 32 MiB and
the headers are read: of 10,000 tensors in 0.2 s of one core, the disk being asked for all samples at once.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

SAMPLE_BYTES: Final = 4096
MAX_SAMPLES: Final = 8192
MAX_HEADER_BYTES: Final = 100_000_000
"""The safetensors format's own bound."""
MAX_TEXT_BYTES: Final = 32 << 20
"""Most that is read of one configuration file or program."""

CONFIG_FILES: Final = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
)
PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TRAINING_FILES: Final = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
"""Lie beside weights and are none."""

_ANY_WEIGHTS: Final = ("consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt", "*.gguf")
_PATTERNS: Final = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "npcache": ("*.bin",),
    "pt": ("*.pt",),
}
"""What vLLM's loader looks for, by `load_format`: the first that is there."""
_INDEXES: Final = {
    "consolidated*.safetensors": "consolidated.safetensors.index.json",
    "*.safetensors": "model.safetensors.index.json",
}
_NUMBER: Final = re.compile(r"[0-9]+")


class Files(NamedTuple):
    """Digests of a checkpoint's files.

    Args:
        weights: of its weights and of the configuration of the model; None if there are no weights here.
        config: of the configuration alone.
        processor: of each file of the processor, by name.
        nbytes: how much was read.
    """

    weights: str | None
    config: str
    processor: dict[str, str]
    nbytes: int


def read_files(
    path: Path, *, load_format: str = "auto", remote_code: bool = False, config: Path | None = None
) -> Files:
    """Read a checkpoint's directory, or its one file (GGUF).

    Args:
        path: the directory or file.
        load_format: vLLM's, which decides between formats that lie side by side.
        remote_code: whether the programs in it are used; then they count as the processor's.
        config: the directory of config.json, if it is another one.

    Raises:
        OSError: something in it cannot be read.
    """
    directory = path if path.is_dir() else path.parent
    meter = _Meter()
    configs = {name: _text_digest(directory / name, meter) for name in CONFIG_FILES}
    if config is not None:
        configs["config.json"] = _text_digest(config / "config.json", meter)
    processor = {name: _text_digest(directory / name, meter) for name in PROCESSOR_FILES}
    if remote_code:
        processor |= {file.name: _text_digest(file, meter) for file in sorted(directory.glob("*.py"))}
    of_config = hashlib.blake2b(digest_size=32, person=b"mmc1.ec.config")
    for name, digest in configs.items():
        if digest is not None:
            _frame(of_config, name.encode(), digest.encode())
    files = _weight_files(path, load_format)
    weights = None
    if files:
        of_weights = hashlib.blake2b(of_config.digest(), digest_size=32, person=b"mmc1.ec.weights")
        _add_weights(of_weights, directory, files, meter)
        weights = of_weights.hexdigest()
    present = {name: digest for name, digest in processor.items() if digest is not None}
    return Files(weights, of_config.hexdigest(), present, meter.nbytes)


class _Meter:
    """Counts what is read."""

    def __init__(self) -> None:
        self.nbytes = 0

    def read(self, file: int, nbytes: int, offset: int) -> bytes:
        """Up to `nbytes` from `offset`; fewer only at the end of the file."""
        parts: list[bytes] = []
        while nbytes > 0 and (part := os.pread(file, nbytes, offset)):
            parts.append(part)
            nbytes -= len(part)
            offset += len(part)
            self.nbytes += len(part)
        return b"".join(parts)


def _frame(hasher: hashlib.blake2b, *parts: bytes) -> None:
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)


def _text_digest(file: Path, meter: _Meter) -> str | None:
    """Of a small file's content, and of its size should it not be small; None if there is no such file."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        size = os.fstat(handle).st_size
        content = meter.read(handle, min(size, MAX_TEXT_BYTES), 0)
    finally:
        os.close(handle)
    return hashlib.blake2b(size.to_bytes(8, "big") + content, digest_size=32, person=b"mmc1.ec.text").hexdigest()


def _weight_files(path: Path, load_format: str) -> list[str]:
    """The files, relative to their directory, that vLLM's loader would take, in order."""
    if path.is_file():
        siblings = sorted(file.name for file in path.parent.glob("mmproj*.gguf") if file != path)
        return [path.name, *siblings]
    names = sorted(name for name in os.listdir(path) if name not in TRAINING_FILES and (path / name).is_file())
    for pattern in _PATTERNS.get(load_format, _ANY_WEIGHTS):
        if found := fnmatch.filter(names, pattern):
            listed = _listed(path / _INDEXES[pattern]) if pattern in _INDEXES else None
            return [name for name in listed if (path / name).is_file()] if listed else found
    return []


def _listed(index: Path) -> list[str] | None:
    """The files of a safetensors index: others beside them are not loaded."""
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
        return sorted(files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


class _Tensor(NamedTuple):
    name: str
    file: int
    offset: int
    nbytes: int


def _add_weights(hasher: hashlib.blake2b, directory: Path, names: list[str], meter: _Meter) -> None:
    handles: list[int] = []
    try:
        tensors: list[_Tensor] = []
        opaque: list[_Tensor] = []
        for number, name in enumerate(names):
            handle = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
            handles.append(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)  # else each sample would read ahead 128 KiB
            size = os.fstat(handle).st_size
            header, found = _read_header(handle, number, size, meter) if name.endswith(".safetensors") else (b"", None)
            _frame(hasher, name.encode(errors="surrogateescape"), size.to_bytes(8, "big"), header)
            if found is None:
                opaque.append(_Tensor("", number, 0, size))
            else:
                tensors += found
        samples = [*_choose(tensors), *_cut(opaque)]
        samples.sort(key=lambda tensor: (tensor.file, tensor.offset))
        for tensor in samples:  # a disk looks for many at a time almost as fast as for one
            offset, nbytes = _middle(tensor)
            os.posix_fadvise(handles[tensor.file], offset, nbytes, os.POSIX_FADV_WILLNEED)
        for tensor in samples:
            offset, nbytes = _middle(tensor)
            content = meter.read(handles[tensor.file], nbytes, offset)
            _frame(hasher, tensor.name.encode(errors="surrogatepass"), offset.to_bytes(8, "big"), content)
    finally:
        for handle in handles:
            os.close(handle)


def _read_header(handle: int, number: int, size: int, meter: _Meter) -> tuple[bytes, list[_Tensor] | None]:
    """A safetensors file's header and its tensors; None if it has none that can be read."""
    nbytes = int.from_bytes(meter.read(handle, 8, 0), "little")
    if not 2 <= nbytes <= min(MAX_HEADER_BYTES, size - 8):
        return b"", None
    header = meter.read(handle, nbytes, 8)
    try:
        tensors = []
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                if not 0 <= begin <= end <= size - 8 - nbytes:
                    return header, None
                tensors.append(_Tensor(name, number, 8 + nbytes + begin, end - begin))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return header, None
    return header, tensors


def _middle(tensor: _Tensor) -> tuple[int, int]:
    """Where its sample begins, and how long that is."""
    nbytes = min(tensor.nbytes, SAMPLE_BYTES)
    return tensor.offset + (tensor.nbytes - nbytes) // 2, nbytes


def _choose(tensors: list[_Tensor]) -> Iterator[_Tensor]:
    """All, if they are not too many; else those of small families whole, and the large ones' evenly."""
    families: dict[str, list[_Tensor]] = {}
    for tensor in tensors:
        families.setdefault(_NUMBER.sub("#", tensor.name), []).append(tensor)
    budget, left = MAX_SAMPLES, len(families)
    for _, family in sorted(families.items(), key=lambda item: (len(item[1]), item[0])):
        share = min(len(family), budget // left)
        yield from (family[index * len(family) // share] for index in range(share))
        budget -= share
        left -= 1


def _cut(files: Iterable[_Tensor]) -> Iterator[_Tensor]:
    """Even samples of files without a header, the first and the last bytes among them."""
    files = list(files)
    for file in files:
        count = max(2, min(MAX_SAMPLES // len(files), -(-file.nbytes // SAMPLE_BYTES)))
        last = max(0, file.nbytes - SAMPLE_BYTES)
        for index in range(count):
            yield _Tensor("", file.file, index * last // (count - 1), min(SAMPLE_BYTES, file.nbytes))
