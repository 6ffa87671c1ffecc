"""What tests ask of vLLM's workers: how often they really encoded, and to stand still where it hurts.

Each is a method that an engine's `collective_rpc` calls on every worker; `install` comes first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, Protocol

CLASS = f"{__name__}.Probe"
"""For `worker_extension_cls`."""
HOLD_SECONDS = 120.0
_POLL_SECONDS = 0.005


class Probe:
    """A base that vLLM adds to its worker's class."""

    rank: int
    model_runner: Any

    def probe_install(self) -> dict[str, int]:
        """Count what the encoder does from now on; the worker's process id and rank. Idempotent."""
        if not hasattr(self, "_probe"):
            self._probe = _Encoder(self.model_runner.model)
        return {"pid": os.getpid(), "rank": self.rank}

    def probe_encoder(self) -> dict[str, float]:
        """How many items were encoded since `probe_install`, in how many calls, in how many seconds."""
        return dict(self._probe.figures)

    def probe_hold(self, gate: str) -> None:
        """The encoder's next call does not end while there is a file `gate`; it tells so by one `gate.held`."""
        self._probe.gate = Path(gate)

    def probe_stop_in_load(self, rank: str) -> None:
        """The worker of this rank stops itself (SIGSTOP) once, when it has loaded one item of the next step."""
        if self.rank == int(rank):
            from vllm.distributed.ec_transfer import get_ec_transfer  # noqa: PLC0415 - only within an engine

            connector = get_ec_transfer()
            load = connector.start_load_caches

            def load_and_stop(encoder_cache: MutableMapping[str, Any], **arguments: Any) -> None:
                watched = _Stopping(encoder_cache)
                load(watched, **arguments)
                if watched.stopped:
                    connector.start_load_caches = load

            connector.start_load_caches = load_and_stop

    def probe_hooks(self) -> dict[str, list[tuple[int, int]]]:
        """What each call of the scheduler's hooks took since the last time, if `vllm_timed` is its connector."""
        from benchmarks import vllm_timed  # noqa: PLC0415 - only within an engine

        return vllm_timed.taken()

    def probe_shapes(self) -> dict[str, list[int]]:
        """The shapes of all that the engine's encoder cache holds."""
        return {name: list(tensor.shape) for name, tensor in self.model_runner.encoder_cache.items()}


class Engine(Protocol):
    """What is needed of one to hold its encoder."""

    log: Path

    def rpc(self, method: str, *arguments: str) -> list[Any]:
        """What a method of each worker returns."""


@contextlib.contextmanager
def holding(engine: Engine) -> Iterator[Callable[[], None]]:
    """No encoder of an engine gets on within a `with` block; what it yields waits until one stands still."""
    gate = engine.log.with_suffix(".gate")
    gate.touch()
    _held(gate).unlink(missing_ok=True)
    engine.rpc("probe_hold", str(gate))

    def wait() -> None:
        deadline = time.monotonic() + HOLD_SECONDS
        while not _held(gate).exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the encoder was not called")
            time.sleep(_POLL_SECONDS)

    try:
        yield wait
    finally:
        gate.unlink(missing_ok=True)  # the engine may have been ended, and its folder with it


def _held(gate: Path) -> Path:
    return gate.with_suffix(".held")


class _Encoder:
    """In the place of a model's `embed_multimodal`."""

    def __init__(self, model: Any) -> None:
        self.figures = {"items": 0, "calls": 0, "seconds": 0.0}
        self.gate: Path | None = None
        self._encode = model.embed_multimodal
        model.embed_multimodal = self

    def __call__(self, **inputs: Any) -> Any:
        started = time.perf_counter()
        if self.gate is not None:
            _held(self.gate).touch()
            while self.gate.exists():
                time.sleep(_POLL_SECONDS)
            self.gate = None
        outputs = self._encode(**inputs)
        self.figures["items"] += len(outputs)
        self.figures["calls"] += 1
        self.figures["seconds"] += time.perf_counter() - started
        return outputs


class _Stopping(MutableMapping[str, Any]):
    """An encoder cache that stops the process when the first item has been put into it."""

    def __init__(self, cache: MutableMapping[str, Any]) -> None:
        self.stopped = False
        self._cache = cache

    def __setitem__(self, name: str, tensor: Any) -> None:
        self._cache[name] = tensor
        if not self.stopped:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)

    def __getitem__(self, name: str) -> Any:
        return self._cache[name]

    def __delitem__(self, name: str) -> None:
        del self._cache[name]

    def __iter__(self) -> Any:
        return iter(self._cache)

    def __len__(self) -> int:
        return len(self._cache)
