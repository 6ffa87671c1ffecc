from __future__ import annotations

import io

import numpy as np
import pytest
from made_images import distinct, oriented, picture
from PIL import Image

from mmcache.errors import InvalidEntry
from mmcache.hashing import hash_encoded, hash_image

# I1: mode and size


def test_images_of_the_same_bytes_but_another_size_or_mode_differ() -> None:
    data = bytes(range(24))
    assert distinct(
        *(hash_image(picture("L", size, data)) for size in [(6, 4), (4, 6), (24, 1), (1, 24), (3, 8)]),
        hash_image(picture("RGB", (2, 4), data)),
        hash_image(picture("YCbCr", (2, 4), data)),
        hash_image(picture("RGBA", (2, 3), data)),
        hash_image(picture("CMYK", (2, 3), data)),
        hash_image(picture("I", (2, 3), data)),
        hash_image(picture("F", (2, 3), data)),
    )


def test_images_of_the_same_indices_but_another_palette_differ() -> None:
    def indexed(palette: list[int], mode: str = "RGB") -> Image.Image:
        image = picture("P")
        image.putpalette(palette, mode)
        return image

    colours = list(range(12))
    assert distinct(
        hash_image(indexed(colours)),
        hash_image(indexed(colours[::-1])),
        hash_image(indexed(colours, "RGBA")),
        hash_image(picture("P")),
        hash_image(picture("L")),
    )


def test_the_transparent_colour_counts() -> None:
    digests = []
    for transparency in (None, 0, 1, b"\0\1", (0, 1, 2)):
        image = picture()
        if transparency is not None:
            image.info["transparency"] = transparency
        digests.append(hash_image(image))
    assert distinct(*digests)


def test_the_orientation_counts_where_it_would_turn_the_image() -> None:
    assert distinct(*(hash_image(oriented(orientation)) for orientation in range(1, 9)))
    assert hash_image(oriented(1)) == hash_image(oriented(99)) == hash_image(picture())


def test_metadata_that_no_encoder_sees_does_not_count() -> None:
    image = picture()
    image.info.update(comment=b"a holiday", dpi=(72, 72), icc_profile=b"profile")
    image.getexif()[0x010F] = "a camera"
    assert hash_image(image) == hash_image(picture())


def test_an_image_with_unreadable_exif_is_hashed_as_without() -> None:
    image = picture()
    image.info["exif"] = b"Exif\0\0neither TIFF nor anything"
    assert hash_image(image) == hash_image(picture())


@pytest.mark.parametrize("encoding", ["PNG", "GIF", "JPEG"])
def test_an_image_is_hashed_alike_before_and_after_it_was_loaded(encoding: str) -> None:
    file = io.BytesIO()
    picture("L", (8, 8)).save(file, encoding)
    loaded = Image.open(io.BytesIO(file.getvalue()))
    loaded.load()
    assert hash_image(Image.open(file)) == hash_image(loaded)


def test_every_pixel_counts() -> None:
    digests = {hash_image(picture())}
    for index in range(72):
        data = bytearray(range(72))
        data[index] ^= 1
        digests.add(hash_image(picture(data=bytes(data))))
    assert len(digests) == 73


def test_what_is_no_image_or_cannot_be_decoded_is_refused() -> None:
    file = io.BytesIO()
    picture("RGB", (64, 64), bytes(64 * 64 * 3)).save(file, "PNG")
    for wrong in ("photo.jpg", b"bytes", None, np.zeros((4, 4, 3), "u1")):
        with pytest.raises(InvalidEntry, match="takes a PIL image"):
            hash_image(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidEntry, match="cannot be decoded"):
        hash_image(Image.open(io.BytesIO(file.getvalue()[:60])))


# Encoded bytes


def test_encoded_bytes_are_hashed_as_they_are_whatever_holds_them() -> None:
    data = bytes(range(200))
    assert hash_encoded(data) == hash_encoded(bytearray(data)) == hash_encoded(memoryview(data))
    assert hash_encoded(memoryview(data)[::2]) == hash_encoded(data[::2])
    assert distinct(
        hash_encoded(data), hash_encoded(data[:-1]), hash_encoded(data + b"\0"), hash_encoded(data, "audio")
    )


def test_encoded_bytes_of_another_type_or_kind_are_refused() -> None:
    for wrong in ("text", None, [1, 2], np.zeros(3)):
        with pytest.raises(InvalidEntry, match="hash_encoded takes"):
            hash_encoded(wrong)  # type: ignore[arg-type]
    for kind in ("", None):
        with pytest.raises(InvalidEntry, match="kind"):
            hash_encoded(b"", kind)  # type: ignore[arg-type]
