"""The work of `mmcache get`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmcache.cli.entries.connection import FAILURES, check_answers, connected, word_for
from mmcache.cli.entries.metadata import metadata_for_file
from mmcache.cli.entries.outcome import Outcome, TensorShape
from mmcache.config import Settings
from mmcache.errors import MMCacheError
from mmcache.key import EmbeddingKey

if TYPE_CHECKING:
    from mmcache.client.cache import MMCache


def read(key: EmbeddingKey, settings: Settings, config: Path | None, target: Path | None) -> Outcome:
    """Read an entry, and write it to `target` if that is given.

    Raises:
        InputError: the file cannot be written.
        InvalidEntry: no safetensors file can hold the entry.
    """
    try:
        check_answers(settings)
        with connected(config, tell_uses=False) as cache:
            return _read(cache, key, target)
    except FAILURES as error:
        return Outcome("miss", key, reason=word_for(error), detail=str(error))


def _read(cache: MMCache, key: EmbeddingKey, target: Path | None) -> Outcome:
    try:
        embedding = cache.get(key)
    except FAILURES as error:
        return Outcome("miss", key, reason=word_for(error, cache.stats()), detail=str(error))
    if embedding is None:
        return Outcome("miss", key, reason="absent", detail=_why_absent(cache, key))
    if target is not None:
        from mmcache.cli.entries import files  # noqa: PLC0415 (torch, which a miss has no need of)

        files.write(target, embedding.tensors, metadata_for_file(embedding.meta))
    tensors = [
        TensorShape(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes)
        for name, tensor in embedding.tensors.items()
    ]
    return Outcome(
        "hit",
        key,
        source=embedding.source,
        nbytes=sum(tensor.nbytes for tensor in tensors),
        tensors=tensors,
        meta=dict(embedding.meta),
        output="" if target is None else str(target),
    )


def _why_absent(cache: MMCache, key: EmbeddingKey) -> str:
    try:
        [known] = cache.lookup([key])
    except MMCacheError as error:
        return f"the store does not have it; what the controller knows is not known: {error}"
    if known is None:
        return "neither the store nor the controller knows it"
    return "the controller knows it, but the store has it no longer"
