"""Which photographs the demo uses: ones that scikit-image's wheel ships, or those in the user's directory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from mmcache.cli.demo.errors import DemoError
from mmcache.cli.errors import InputError
from mmcache.hashing import hash_image

if TYPE_CHECKING:
    from PIL import Image

SHIPPED: Final = (
    "astronaut.png", "brick.png", "camera.png", "chelsea.png", "clock_motion.png", "coffee.png", "coins.png",
    "grass.png", "gravel.png", "hubble_deep_field.jpg", "moon.png", "motorcycle_left.png", "motorcycle_right.png",
    "retina.jpg", "rocket.jpg",
)  # fmt: skip
"""Photographs only: the wheel's drawings, charts and test patterns are left out."""

MOST: Final = 200
"""Most photographs taken from a directory: each is encoded twice, in about half a second."""


class Photograph(NamedTuple):
    """One file and the digest of the pixels that the encoder will see."""

    path: Path
    mm_hash: str


class Found(NamedTuple):
    """What a directory held: photographs by name, files that are no images, and images beyond `MOST`."""

    photographs: list[Photograph]
    unreadable: list[Path]
    left_out: int


def open_photograph(path: Path) -> Image.Image:
    """The picture as RGB, turned upright as its EXIF orientation says.

    Raises:
        DemoError: the file is no image that Pillow reads.
    """
    from PIL import Image, ImageOps  # noqa: PLC0415  (an extra's dependency)

    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # a malformed file makes Pillow raise just anything
        raise DemoError(f"{path} is not an image that Pillow reads: {error}") from error


def shipped_directory() -> Path:
    """Where scikit-image keeps its pictures.

    Raises:
        DemoError: it is not installed.
    """
    spec = importlib.util.find_spec("skimage")  # found, not imported: only its files are wanted
    if spec is None or spec.origin is None:
        raise DemoError("scikit-image, which ships the photographs, is not installed: pip install 'mmcache[demo]'")
    return Path(spec.origin).parent / "data"


def find_photographs(directory: Path | None, *, most: int = MOST) -> Found:
    """The photographs of a directory (not of its subdirectories), or the shipped ones if it is None.

    Raises:
        InputError: there is no such directory, or it holds no image.
        DemoError: scikit-image, which ships the others, is not installed.
    """
    if directory is None:
        shipped = shipped_directory()
        paths = [shipped / name for name in SHIPPED if (shipped / name).is_file()]
    elif directory.is_dir():
        paths = sorted(path for path in directory.iterdir() if path.is_file())
    else:
        raise InputError(f"--images {directory}: is not a directory")

    photographs: list[Photograph] = []
    unreadable: list[Path] = []
    left_out = 0
    for path in paths:
        if len(photographs) == most:
            left_out += 1
            continue
        try:
            photographs.append(Photograph(path, hash_image(open_photograph(path))))
        except DemoError:
            unreadable.append(path)
    if not photographs and directory is not None:
        raise InputError(f"--images {directory}: holds no image that Pillow reads")
    if not photographs:
        raise DemoError(f"{shipped_directory()} holds no image that Pillow reads: install scikit-image again")
    return Found(photographs, unreadable, left_out)
