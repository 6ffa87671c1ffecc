"""The options that name an entry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmcache.cli.errors import InputError
from mmcache.key import EmbeddingKey

Model = Annotated[str, typer.Option("--model", metavar="M", help="The encoder, such as google/siglip.")]
Version = Annotated[
    str, typer.Option("--version", metavar="V", help="Its weights, and all else that changes the output.")
]
MmHash = Annotated[str | None, typer.Option("--mm-hash", metavar="H", help="The item's content digest.")]
HashFile = Annotated[
    Path | None,
    typer.Option(metavar="ITEM", help="Instead: hash this file (JPEG, MP4, …), as hashing.hash_encoded does."),
]
Lora = Annotated[str | None, typer.Option("--lora", metavar="D", help="Digest of the adapter's content, if any.")]
Modality = Annotated[str, typer.Option("--modality", metavar="WORD", help="image, video, audio, …")]
Tenant = Annotated[str, typer.Option("--tenant", metavar="T", help="Tenants never share entries.")]
Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Settings. Default: the file that MMCACHE_CONFIG names."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else on stdout.")]


def key_of(
    model: str, version: str, mm_hash: str | None, hash_file: Path | None, lora: str | None, modality: str, tenant: str
) -> EmbeddingKey:
    """The key that the options name. Raises InvalidKey, and InputError for what no field of the key is to blame."""
    if (mm_hash is None) == (hash_file is None):
        raise InputError("give either --mm-hash H or --hash-file ITEM")
    if hash_file is not None:
        from mmcache.hashing import hash_encoded  # noqa: PLC0415 (numpy, which `mmcache --help` has no need of)

        try:
            mm_hash = hash_encoded(hash_file.read_bytes(), kind=modality)
        except OSError as error:
            raise InputError(f"--hash-file {hash_file}: {error.strerror}") from error
    return EmbeddingKey(model, version, str(mm_hash), lora=lora, modality=modality, tenant=tenant)
