"""LoRA adapters by what is in them: a name, a path or vLLM's number for one can each mean other weights tomorrow."""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import math
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from mmcache.errors import MMCacheError
from mmcache.integrations.vllm.checkpoint import TRAINING_FILES
from mmcache.integrations.vllm.snapshots import cached_snapshot

_log = logging.getLogger(__name__)

CHECK_S: Final = 1.0
"""An answer that is older is checked again, in the background."""
MAX_AGE_S: Final = 5.0
"""One that is older than this is not given before that."""
INPLACE_MAX_AGE_S: Final = 0.2
"""The same for adapters that vLLM reloads with each step (`load_inplace`)."""
PATIENCE_S: Final = 2.0
"""How long it is waited for a digest; without it then, requests go on without the cache."""
RETRY_S: Final = 5.0
"""How long an adapter that could not be read is not read again."""
MAX_ADAPTERS: Final = 1024
CHUNK_BYTES: Final = 1 << 20

_CONFIG: Final = "adapter_config.json"
_SUFFIXES: Final = (".safetensors", ".bin", ".pt")


class AdapterUnreadable(MMCacheError):
    """The files of an adapter are missing, cannot be read, or changed while they were read."""


class LoRARequest(Protocol):
    """What is used of vLLM's `LoRARequest`."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool


class NoDigest(enum.Enum):
    """Why there is no digest."""

    PENDING = "pending"
    """It is being computed: ask again."""
    UNKNOWN = "unknown"
    """Which weights the engine has cannot be told: encode without the cache."""


class _File(NamedTuple):
    """One file as it was found; while all of this is the same, so is its content."""

    name: str
    nbytes: int
    mtime_ns: int
    inode: int


class _Signature(NamedTuple):
    path: str
    files: tuple[_File, ...]


def lora_digest(path: str | Path) -> str:
    """Digest of an adapter: 64 hex digits over the names and contents of its configuration and its weights.

    `path` is what a `LoRARequest` has: a directory, or a repository that Hugging Face's cache holds. Reads all of it, a
    MiB at a time, unless the files are the same as in an earlier call: by name, size, time of change and inode.

    Raises:
        AdapterUnreadable: the path or the weights are missing, unreadable, or changed meanwhile.
    """
    return _digest_of(_signature(path))


def _signature(path: str | Path) -> _Signature:
    directory = _resolve(os.fspath(path))
    try:
        files = []
        for name in sorted(os.listdir(directory)):
            if name == _CONFIG or (name.endswith(_SUFFIXES) and name not in TRAINING_FILES):
                status = os.stat(directory / name)
                files.append(_File(name, status.st_size, status.st_mtime_ns, status.st_ino))
    except OSError as error:
        raise AdapterUnreadable(f"LoRA adapter {directory}: {error.strerror or error}") from error
    if not any(file.name.endswith(_SUFFIXES) for file in files):
        raise AdapterUnreadable(f"LoRA adapter {directory}: holds no weights ({', '.join(_SUFFIXES)})")
    return _Signature(str(directory), tuple(files))


def _resolve(path: str) -> Path:
    """Where vLLM finds it: a directory, else a repository, of which here only what was downloaded."""
    expanded = Path(path).expanduser()
    if expanded.is_absolute() or expanded.exists():
        return expanded.absolute()
    snapshot = cached_snapshot(path, _CONFIG)
    if snapshot is None:
        raise AdapterUnreadable(f"LoRA adapter {path}: no such directory, nor a downloaded repository")
    return snapshot


@functools.lru_cache(maxsize=MAX_ADAPTERS)
def _digest_of(signature: _Signature) -> str:
    hasher = hashlib.blake2b(digest_size=32, person=b"mmc1.ec.lora")
    directory = Path(signature.path)
    try:
        for file in signature.files:
            hasher.update(len(file.name.encode(errors="surrogateescape")).to_bytes(8, "big"))
            hasher.update(file.name.encode(errors="surrogateescape"))
            hasher.update(file.nbytes.to_bytes(8, "big"))
            with open(directory / file.name, "rb", buffering=0) as content:
                left = file.nbytes
                while left > 0 and (chunk := content.read(min(CHUNK_BYTES, left))):
                    hasher.update(chunk)
                    left -= len(chunk)
    except OSError as error:
        raise AdapterUnreadable(f"LoRA adapter {directory}: {error.strerror or error}") from error
    if _signature(signature.path) != signature:
        raise AdapterUnreadable(f"LoRA adapter {directory}: changed while it was read")
    return hasher.hexdigest()


class _Adapter:
    """One adapter as an engine was told of it."""

    __slots__ = ("answer", "asked", "checked", "checking", "inplace", "known", "path", "uncertain")

    def __init__(self, path: str) -> None:
        self.path = path
        self.answer: str | NoDigest = NoDigest.PENDING
        self.known = ""
        """Its digest when it was first read."""
        self.uncertain = False
        """It has been read as something else since."""
        self.inplace = False
        self.checking = False
        self.asked = 0.0
        self.checked = -math.inf


class LoraDigests:
    """Digests of the adapters of an engine's requests, computed on one background thread.

    vLLM reads an adapter's files when it first needs them, and again at times that nobody is told of. So when files
    have changed under the same name and number, the digest of neither the old nor the new is right for certain: such
    an adapter is refused until it is loaded anew (another number, or `load_inplace`). The same goes for a number that
    has come to mean another path.

    Args:
        clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failures = 0
        """Adapters that became unknown."""
        self._clock = clock
        self._adapters: OrderedDict[tuple[int, str, str], _Adapter] = OrderedDict()
        self._latest: dict[int, tuple[int, str, str]] = {}
        self._logged: set[str] = set()
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[_Adapter | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def digest(self, request: LoRARequest | None) -> str | NoDigest | None:
        """The digest of a request's adapter, without waiting; None: it has none."""
        if request is None:
            return None
        name = (request.lora_int_id, request.lora_name, request.lora_path)
        now = self._clock()
        with self._lock:
            adapter = self._known(name, inplace=request.load_inplace)
            if adapter is None or self._closed:
                return NoDigest.UNKNOWN
            unknown = adapter.answer is NoDigest.UNKNOWN
            age = now - adapter.checked
            again = INPLACE_MAX_AGE_S if adapter.inplace else RETRY_S if unknown else CHECK_S
            if age >= again and not adapter.checking and not adapter.uncertain:
                self._check(adapter, now)
            if unknown or age < (INPLACE_MAX_AGE_S if adapter.inplace else MAX_AGE_S):
                return adapter.answer
            return NoDigest.PENDING if now < adapter.asked + PATIENCE_S else NoDigest.UNKNOWN

    def close(self) -> None:
        """End the thread, once it is done with what it reads. Idempotent."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._work.put(None)
            thread.join(timeout=1.0)

    def _known(self, name: tuple[int, str, str], *, inplace: bool) -> _Adapter | None:
        """The adapter; None if its number means another one by now."""
        number = name[0]
        if not inplace and self._latest.get(number, name) != name:
            return None
        adapter = self._adapters.get(name)
        if adapter is None:
            adapter = self._adapters[name] = _Adapter(name[2])
            while len(self._adapters) > MAX_ADAPTERS:
                old, _ = self._adapters.popitem(last=False)
                if self._latest.get(old[0]) == old:
                    del self._latest[old[0]]
        self._adapters.move_to_end(name)
        self._latest[number] = name
        if inplace and not adapter.inplace:  # the engine has just read its files
            adapter.inplace, adapter.uncertain = True, False
            adapter.answer, adapter.checked = NoDigest.PENDING, -math.inf
        return adapter

    def _check(self, adapter: _Adapter, now: float) -> None:
        adapter.checking, adapter.asked = True, now
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mmcache-lora", daemon=True)
            self._thread.start()
        self._work.put(adapter)

    def _run(self) -> None:
        while (adapter := self._work.get()) is not None:
            began = self._clock()
            answer: str | NoDigest = NoDigest.UNKNOWN
            fault = ""
            try:
                answer = lora_digest(adapter.path)
            except AdapterUnreadable as error:
                fault = str(error)
            except Exception as error:  # noqa: BLE001 - the thread must live on; told below
                fault = f"LoRA adapter {adapter.path}: {error!r}"
            with self._lock:
                if isinstance(answer, str) and not adapter.inplace:
                    adapter.known = adapter.known or answer
                    if answer != adapter.known:
                        adapter.uncertain, answer = True, NoDigest.UNKNOWN
                        fault = f"LoRA adapter {adapter.path}: its files are not what they were when it was first used"
                if answer is NoDigest.UNKNOWN and adapter.answer is not NoDigest.UNKNOWN:
                    self.failures += 1
                adapter.answer, adapter.checked, adapter.checking = answer, began, False
            if fault and fault not in self._logged and len(self._logged) < MAX_ADAPTERS:
                self._logged.add(fault)
                _log.warning("%s; its requests are encoded without the cache", fault)
