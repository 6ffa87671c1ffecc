"""Pictures, clips and sounds for requests to vLLM, each the same whenever it is made from the same numbers."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import msgspec
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
SAMPLING_RATE = 16_000
_TILES = 4


class Picture(msgspec.Struct, frozen=True, tag=True):
    """Coloured tiles: unlike noise, no two of them look alike to an encoder. 56 x 56 is 4 embeddings."""

    seed: int
    width: int = 56
    height: int = 56

    modality = "image"

    def array(self) -> Array:
        """Height x width x RGB."""
        return _tiles(np.random.default_rng(self.seed), self.width, self.height)

    def png(self) -> bytes:
        """As a file."""
        from PIL import Image  # noqa: PLC0415

        file = io.BytesIO()
        Image.fromarray(self.array()).save(file, "PNG")
        return file.getvalue()

    def part(self) -> dict[str, Any]:
        """As a part of a message to the chat API."""
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_text(self.png())}"}}


class Clip(msgspec.Struct, frozen=True, tag=True):
    """A video of coloured tiles; 4 frames of 56 x 56 are 8 embeddings."""

    seed: int
    frames: int = 4
    width: int = 56
    height: int = 56

    modality = "video"

    def array(self) -> Array:
        """Frames x height x width x RGB."""
        random = np.random.default_rng([self.seed, 1])
        return np.stack([_tiles(random, self.width, self.height) for _ in range(self.frames)])

    def part(self) -> dict[str, Any]:
        """As a part of a message to the chat API: its frames as they are, one picture after another."""
        from PIL import Image  # noqa: PLC0415

        frames = []
        for frame in self.array():
            file = io.BytesIO()
            Image.fromarray(frame).save(file, "JPEG", quality=95)
            frames.append(_text(file.getvalue()))
        return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(frames)}"}}


class Sound(msgspec.Struct, frozen=True, tag=True):
    """A chord that changes; a second is 25 embeddings."""

    seed: int
    seconds: float = 1.0

    modality = "audio"

    def array(self) -> Array:
        """Samples at `SAMPLING_RATE`."""
        random = np.random.default_rng([self.seed, 2])
        times = np.arange(round(self.seconds * SAMPLING_RATE)) / SAMPLING_RATE
        tones = [np.sin(2 * np.pi * hertz * times * (1 + times)) for hertz in random.uniform(80, 2000, size=4)]
        samples: Array = np.sum(tones, axis=0).astype(np.float32) / len(tones)
        return samples

    def part(self) -> dict[str, Any]:
        """As a part of a message to the chat API."""
        file = io.BytesIO()
        with wave.open(file, "wb") as written:
            written.setnchannels(1)
            written.setsampwidth(2)
            written.setframerate(SAMPLING_RATE)
            written.writeframes((self.array() * 32767).astype("<i2").tobytes())
        return {"type": "input_audio", "input_audio": {"data": _text(file.getvalue()), "format": "wav"}}


class Handed(msgspec.Struct, frozen=True, tag=True):
    """An item of which only its place in the prompt is told: its embedding is with the cache, under `identifier`."""

    identifier: str
    metadata: dict[str, Any]
    """As in a producer's `ec_transfer_params`: lists of numbers."""
    modality: str = "image"

    def fields(self) -> dict[str, Any]:
        """As vLLM takes them: each with a first dimension for items."""
        import torch  # noqa: PLC0415

        return {name: torch.tensor(values)[None] for name, values in self.metadata.items()}

    def part(self) -> dict[str, Any]:
        """As a part of a message to the chat API."""
        import torch  # noqa: PLC0415

        fields: dict[str, str] = {}
        for name, tensor in self.fields().items():
            file = io.BytesIO()
            torch.save(tensor[0], file)
            fields[name] = _text(file.getvalue())
        return {"type": "image_embeds", "image_embeds": fields, "uuid": self.identifier}


Medium = Picture | Clip | Sound | Handed


def _tiles(random: np.random.Generator, width: int, height: int) -> Array:
    tiles = random.integers(0, 256, size=(_TILES, _TILES, 3), dtype=np.uint8)
    rows, columns = np.arange(height) * _TILES // height, np.arange(width) * _TILES // width
    return tiles[rows][:, columns]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
