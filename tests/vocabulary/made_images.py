"""Makes images for the tests of content hashing."""

from __future__ import annotations

from PIL import Image

ORIENTATION = 0x0112


def picture(mode: str = "RGB", size: tuple[int, int] = (6, 4), data: bytes | None = None) -> Image.Image:
    nbytes = len(Image.new(mode, size).tobytes())
    return Image.frombytes(mode, size, bytes(range(nbytes)) if data is None else data)


def distinct(*digests: str) -> bool:
    return len(set(digests)) == len(digests)


def oriented(orientation: int) -> Image.Image:
    image = picture()
    image.getexif()[ORIENTATION] = orientation
    return image
