"""The workers' side: copies between the engine's encoder cache and the staging memory, and nothing that can wait."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from typing import NamedTuple

import torch

from mmcache.agent.staging import Staging
from mmcache.errors import ConfigError, MMCacheError
from mmcache.integrations.vllm.item import Copy
from mmcache.memory.host import dtype_name, dtype_of

_log = logging.getLogger(__name__)


class Step(NamedTuple):
    """What the workers are to copy in one step of the engine."""

    number: int
    loads: tuple[Copy, ...]
    saves: tuple[Copy, ...]


class Report(NamedTuple):
    """What one worker, or several together, did in one step: how many did it, and width and cost in ms of each save."""

    step: int
    workers: int
    saved: dict[int, tuple[int, float]]

    def merged(self, other: Report) -> Report:
        """Both together."""
        return Report(self.step, self.workers + other.workers, {**self.saved, **other.saved})


class WorkerSide:
    """One worker.

    Args:
        name, staging_bytes: of the staging memory.
        worker: this worker's rank.
        device: where its encoder cache lies, such as `cuda` or `cpu`.
    """

    def __init__(self, name: str, staging_bytes: int, worker: int, device: str) -> None:
        self._device = device
        self._saves = worker == 0
        """All workers hold the same embeddings: the first publishes them."""
        self._step: Step | None = None
        self._began = 0.0
        self._saved: dict[int, tuple[int, float]] = {}
        self._staging: Staging | None = None
        try:
            self._staging = Staging.open_as_worker(name, staging_bytes, worker)
        except ConfigError:
            raise
        except MMCacheError as error:  # the scheduler sees that it is missing, and has nothing loaded or saved
            _log.error("this worker has no staging memory, so its engine uses no cache: %s", error)

    def begin(self, step: Step) -> None:
        """A step of the engine begins."""
        self._step = step
        self._saved = {}
        self._began = time.perf_counter()

    def load(self, encoder_cache: MutableMapping[str, torch.Tensor]) -> None:
        """Fill the encoder cache with what the step loads: tensors of their own, on the device."""
        if self._step is None or self._staging is None:  # loads are promised only once all workers have mapped it
            return
        for copy in self._step.loads:
            block = self._staging.block(copy.offset, copy.nbytes)
            staged = torch.frombuffer(block, dtype=dtype_of(copy.dtype)).reshape(copy.rows, copy.width)
            encoder_cache[copy.identifier] = staged.to(self._device, copy=True)

    def save_resident(self, encoder_cache: MutableMapping[str, torch.Tensor]) -> None:
        """Save what the step saves and is in the encoder cache already: this step will not encode it."""
        for copy in self._step.saves if self._step is not None else ():
            if copy.identifier in encoder_cache:
                self.save(encoder_cache, copy.identifier)

    def save(self, encoder_cache: MutableMapping[str, torch.Tensor], identifier: str) -> None:
        """Copy an embedding into its block, if this step saves it. Never raises."""
        if not self._saves or self._step is None or self._staging is None:
            return
        for copy in self._step.saves:
            if copy.identifier == identifier and copy.number not in self._saved:
                try:
                    width = _copy_out(encoder_cache[identifier], self._staging, copy)
                except Exception as error:  # noqa: BLE001 - whatever it is, the engine has its embedding; logged, counted
                    _log.warning("an embedding was not saved: %s", error)
                    continue
                self._saved[copy.number] = width, (time.perf_counter() - self._began) * 1000.0

    def end(self) -> Report | None:
        """The step's copies are done; None if it had none."""
        step, self._step = self._step, None
        if step is None or not (step.loads or step.saves):
            return None
        if self._saves and self._staging is not None:
            for number, (width, cost_ms) in self._saved.items():
                self._staging.set_saved(number, width, cost_ms)
            self._staging.set_done_step(step.number)
        return Report(step.number, 1, self._saved)

    def close(self) -> None:
        """Unmap the staging memory. Idempotent."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None


def _copy_out(embedding: object, staging: Staging, copy: Copy) -> int:
    """Copy a matrix of as many rows as it must have; returns its width. Raises ValueError for anything else."""
    if not isinstance(embedding, torch.Tensor) or embedding.dim() != 2 or embedding.shape[0] != copy.rows:
        raise ValueError(f"{copy.identifier[:64]!r} is not a matrix of {copy.rows} rows: {_describe(embedding)}")
    nbytes = embedding.numel() * embedding.element_size()
    if dtype_name(embedding.dtype) != copy.dtype or not 0 < nbytes <= copy.nbytes:
        raise ValueError(f"{copy.identifier[:64]!r} has no block that fits it: {_describe(embedding)}")
    block = staging.block(copy.offset, nbytes)
    torch.frombuffer(block, dtype=embedding.dtype).reshape(embedding.shape).copy_(embedding.detach())
    return int(embedding.shape[1])


def _describe(embedding: object) -> str:
    if isinstance(embedding, torch.Tensor):
        return f"{tuple(embedding.shape)} {embedding.dtype}"
    return type(embedding).__name__
