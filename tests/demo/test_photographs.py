"""Which files become photographs, and what the encoder sees of them."""

from pathlib import Path

import pytest
from PIL import Image

from mmcache.cli.demo.photographs import SHIPPED, find_photographs, open_photograph, shipped_directory
from mmcache.cli.errors import InputError


def paint(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (4, 3)) -> Path:
    Image.new("RGB", size, color).save(path)
    return path


def test_the_shipped_photographs_are_all_there_and_all_different() -> None:
    found = find_photographs(None)
    assert [photograph.path.name for photograph in found.photographs] == list(SHIPPED)
    assert len({photograph.mm_hash for photograph in found.photographs}) == len(SHIPPED)
    assert not found.unreadable
    assert found.left_out == 0


def test_every_shipped_photograph_opens_as_rgb() -> None:
    for name in SHIPPED:
        assert open_photograph(shipped_directory() / name).mode == "RGB"


def test_files_that_are_no_images_are_left_out_and_named(tmp_path: Path) -> None:
    good = paint(tmp_path / "good.png", (1, 2, 3))
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:45])
    (tmp_path / "folder").mkdir()
    found = find_photographs(tmp_path)
    assert [photograph.path for photograph in found.photographs] == [good]
    assert [path.name for path in found.unreadable] == ["cut.png", "notes.txt"]


def test_two_files_with_the_same_pixels_are_one_photograph_to_the_cache(tmp_path: Path) -> None:
    paint(tmp_path / "a.png", (1, 2, 3))
    paint(tmp_path / "b.bmp", (1, 2, 3))
    paint(tmp_path / "c.png", (1, 2, 4))
    a, b, c = (photograph.mm_hash for photograph in find_photographs(tmp_path).photographs)
    assert a == b != c


def test_a_large_directory_is_cut_and_the_rest_counted(tmp_path: Path) -> None:
    for number in range(5):
        paint(tmp_path / f"{number}.png", (number, 0, 0))
    found = find_photographs(tmp_path, most=3)
    assert [photograph.path.name for photograph in found.photographs] == ["0.png", "1.png", "2.png"]
    assert found.left_out == 2


def test_a_picture_is_turned_upright(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by a quarter
    Image.new("RGB", (4, 2)).save(path, exif=exif)
    assert open_photograph(path).size == (2, 4)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: None], ids=["empty", "a file", "missing"])
def test_a_directory_without_photographs_is_refused_by_name(tmp_path: Path, make) -> None:
    directory = tmp_path / "pictures"
    make(directory)
    with pytest.raises(InputError, match="pictures"):
        find_photographs(directory)
