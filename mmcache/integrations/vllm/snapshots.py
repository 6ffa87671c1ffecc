"""What Hugging Face's cache on this machine holds, without a look at the network."""

from __future__ import annotations

from pathlib import Path


def cached_snapshot(
    repository: str, file: str, *, revision: str | None = None, cache: str | None = None
) -> Path | None:
    """The directory of a downloaded snapshot that holds `file`; None if there is none.

    Args:
        repository: such as `Qwen/Qwen3-VL-8B-Instruct`.
        file: one that each snapshot in question has.
        revision: branch, tag or commit; None: the default branch.
        cache: another directory than Hugging Face's own (vLLM's `download_dir`).
    """
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - optional; vLLM brings it

        found = try_to_load_from_cache(repository, file, cache_dir=cache, revision=revision)
    except (ImportError, OSError, ValueError):  # ValueError: not the name of a repository
        return None
    return Path(found).parent if isinstance(found, str) else None
