"""A local checkpoint of a vision transformer: which family it is, and the digest of its content. No torch here."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, Literal

import msgspec

from mmcache.cli.errors import InputError

Family = Literal["siglip", "clip"]

_FAMILIES: Final[dict[str, Family]] = {
    "siglip": "siglip",
    "siglip_vision_model": "siglip",
    "clip": "clip",
    "clip_vision_model": "clip",
}


class _Config(msgspec.Struct, frozen=True):
    model_type: str = ""


class Checkpoint:
    """A directory as `save_pretrained` writes it: `config.json` and safetensors files (no pickle is ever loaded).

    Raises:
        InputError: a file is missing, or it is not a SigLIP or CLIP model; the message says which.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        config = directory / "config.json"
        try:
            model_type = msgspec.json.decode(config.read_bytes(), type=_Config).model_type
        except OSError as error:
            raise InputError(f"--weights needs a directory with a config.json; {config}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise InputError(f"--weights: {config} is not a model's configuration: {error}") from error
        if model_type not in _FAMILIES:
            raise InputError(f"--weights: {config} has model_type {model_type!r}; the demo runs {', '.join(_FAMILIES)}")
        self.family: Family = _FAMILIES[model_type]
        self._files = [config, *sorted(directory.glob("*.safetensors"))]
        if len(self._files) == 1:
            raise InputError(f"--weights: {directory} holds no .safetensors file")

    def digest(self) -> str:
        """64 hex digits over the names and bytes of its files; reads all of them."""
        hasher = hashlib.blake2b(digest_size=32)
        for path in self._files:
            name = path.name.encode()
            hasher.update(len(name).to_bytes(8, "big") + name + path.stat().st_size.to_bytes(8, "big"))
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    hasher.update(chunk)
        return hasher.hexdigest()
