"""The work of `mmcache put`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mmcache.cli.entries import files
from mmcache.cli.entries.connection import FAILURES, check_answers, connected, word_for
from mmcache.cli.entries.metadata import meta_of_file
from mmcache.cli.entries.outcome import Outcome, shapes_of
from mmcache.config import Settings
from mmcache.entry import PREFIX_BYTES, lay_out
from mmcache.key import EmbeddingKey

_POOL_MARGIN: Final = 1 << 20


def publish(
    path: Path,
    key: EmbeddingKey,
    meta: Mapping[str, object],
    settings: Settings,
    config: Path | None,
    *,
    file_metadata: bool,
) -> Outcome:
    """Publish a file's tensors under a key, through a pool of at least what `settings` say.

    Raises:
        InputError, InvalidEntry: the file cannot be an entry.
    """
    contents = files.read(path)
    whole_meta = {**(meta_of_file(contents.metadata, path) if file_metadata else {}), **meta}
    layout = [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in contents.tensors.items()
    ]
    specs, nbytes = lay_out(layout)
    pool_bytes = max(settings.client.pool_bytes, PREFIX_BYTES + nbytes + _POOL_MARGIN)
    try:
        check_answers(settings)
        with connected(config, pool_bytes=pool_bytes) as cache:
            result = cache.put(key, contents.tensors, meta=whole_meta)
    except FAILURES as error:
        return Outcome("dropped", key, reason=word_for(error), detail=str(error))
    if result.status == "duplicate":
        return Outcome("duplicate", key)  # of what is there we know nothing
    return Outcome(result.status, key, nbytes=nbytes, tensors=shapes_of(specs), meta=whole_meta)
