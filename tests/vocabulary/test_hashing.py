from __future__ import annotations

import re
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_images import distinct, oriented, picture

from mmcache.errors import InvalidEntry
from mmcache.hashing import hash_array, hash_audio, hash_encoded, hash_image, hash_tensor, hash_video
from mmcache.key import EmbeddingKey


def test_a_hash_is_64_hex_digits_and_fits_a_key() -> None:
    audio = hash_audio(np.zeros(4, "f4"), 16000)
    for digest in (
        hash_image(picture()),
        hash_encoded(b""),
        hash_array(np.zeros(())),
        hash_tensor(torch.ones(())),
        audio,
    ):
        assert re.fullmatch(r"[0-9a-f]{64}", digest)
        assert EmbeddingKey("m", "v", digest).mm_hash == digest


# I2: shape and dtype


def test_arrays_of_the_same_bytes_but_another_shape_or_dtype_differ() -> None:
    array = np.arange(24, dtype="u1")
    shapes = [(24,), (4, 6), (6, 4), (1, 24), (24, 1), (2, 3, 4)]
    dtypes = [
        "i1",
        "<u2",
        ">u2",
        "<i2",
        "<f2",
        "<f4",
        ">f4",
        "<u4",
        "<f8",
        "<M8[s]",
        "<M8[ns]",
        "<c8",
        "S4",
        "S8",
        "<U2",
    ]
    assert distinct(
        *(hash_array(array.reshape(shape)) for shape in shapes), *(hash_array(array.view(dtype)) for dtype in dtypes)
    )
    assert distinct(*(hash_array(np.zeros(shape, "f4")) for shape in [(0,), (0, 2), (2, 0), (1, 0, 2), ()]))


def test_tensors_of_the_same_bytes_but_another_shape_or_dtype_differ() -> None:
    tensor = torch.arange(24, dtype=torch.uint8)
    dtypes = [
        torch.int8,
        torch.bool,
        torch.int16,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ]
    assert distinct(
        *(hash_tensor(tensor.reshape(shape)) for shape in [(24,), (4, 6), (6, 4), (1, 24), (2, 3, 4)]),
        *(hash_tensor(tensor.view(dtype)) for dtype in dtypes),
        *(hash_tensor(torch.zeros(shape)) for shape in [(0,), (0, 2), (2, 0), ()]),
    )


def test_strides_do_not_matter() -> None:
    array = np.arange(24, dtype="f4").reshape(4, 6)
    one = np.arange(4, dtype="f4")[2::2][:1]  # contiguous, with a stride that no step ever takes
    for view in (array.T, array[::-1], array[:, 1:3], array[::2, ::3], np.broadcast_to(array[0], (4, 6)), one):
        assert hash_array(view) == hash_array(np.array(view, order="C"))
    assert hash_array(np.asfortranarray(array)) == hash_array(array)
    tensor = torch.from_numpy(array.copy())
    single = torch.arange(4.0)[2::2][:1]
    for part in (tensor.T, tensor[:, 1:3], tensor[::2, ::3], tensor[0].expand(4, 6), single, single[:0]):
        assert hash_tensor(part) == hash_tensor(part.clone(memory_format=torch.contiguous_format))


def test_lazy_conjugation_and_gradients_do_not_matter() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert hash_tensor(tensor.conj()) == hash_tensor(tensor.conj().resolve_conj()) != hash_tensor(tensor)
    assert hash_tensor(tensor.conj().imag) == hash_tensor(torch.tensor([-2.0, 4.0]))
    assert hash_tensor(tensor[:1].conj().imag) == hash_tensor(torch.tensor([-2.0]))  # negated, yet contiguous
    assert hash_tensor(torch.nn.Parameter(torch.ones(2))) == hash_tensor(torch.ones(2))


def test_tensors_that_compare_equal_but_have_other_bits_differ() -> None:
    assert hash_tensor(torch.tensor([0.0])) != hash_tensor(torch.tensor([-0.0]))
    assert hash_tensor(torch.tensor([float("nan")])) == hash_tensor(torch.tensor([float("nan")]))


@pytest.mark.filterwarnings("ignore")  # torch warns of what is experimental or on its way out
def test_tensors_without_plain_bytes_are_refused() -> None:
    for wrong in (
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        np.ones(2),
        [1.0],
    ):
        with pytest.raises(InvalidEntry):
            hash_tensor(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        np.array([object()]),
        np.array([None, 1]),
        np.zeros(2, [("a", "i4"), ("b", "O")]),
        np.zeros(2, [("a", "i1"), ("b", "i4")]),
        np.zeros(2, "V0"),
        np.zeros(2, np.longdouble),
        np.ma.masked_array([1, 2], [True, False]),
        [1, 2],
        torch.ones(2),
        np.float32(1),
    ],
    ids=lambda wrong: f"{type(wrong).__name__} {getattr(wrong, 'dtype', '')}",
)
def test_arrays_whose_bytes_are_not_their_values_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidEntry):
        hash_array(wrong)


# I2: sampling metadata


def test_the_sampling_rate_is_part_of_audio() -> None:
    samples = np.arange(8, dtype="f4")
    assert distinct(hash_audio(samples, 16000), hash_audio(samples, 22050), hash_array(samples))
    assert hash_audio(samples, 16000) == hash_audio(samples, 16000.0) == hash_audio(samples, np.int64(16000))  # type: ignore[arg-type]
    assert distinct(
        hash_audio(samples, 8000), hash_audio(samples[None], 8000), hash_audio(torch.from_numpy(samples), 8000)
    )


@pytest.mark.parametrize(
    "rate", [0, -1, float("nan"), float("inf"), 10**400, True, "16000", None, torch.ones(())], ids=str
)
def test_a_sampling_rate_that_is_no_positive_finite_number_is_refused(rate: Any) -> None:
    with pytest.raises(InvalidEntry, match="sampling_rate"):
        hash_audio(np.zeros(4, "f4"), rate)


def test_the_choice_of_frames_is_part_of_a_video() -> None:
    frames = np.zeros((2, 4, 4, 3), "u1")
    assert distinct(
        hash_video(frames),
        hash_video(frames, fps=1),
        hash_video(frames, fps=2),
        hash_video(frames, timestamps=[0, 1]),
        hash_video(frames, timestamps=[0, 2]),
        hash_video(frames, timestamps=[]),
        hash_video(frames, frame_indices=[0, 1]),
        hash_video(frames, frame_indices=[0, 2]),
        hash_video(frames, frame_indices=[0, 1], fps=1),
        hash_video(frames, sampling={}),
        hash_video(frames, sampling={"total_num_frames": 10}),
        hash_video(frames, sampling={"total_num_frames": 11}),
        hash_video(frames, sampling={"duration": 10}),
        hash_array(frames),
    )


def test_the_frames_their_order_and_their_number_are_part_of_a_video() -> None:
    one, two = picture(), picture(data=bytes(72))
    assert distinct(
        hash_video([one]),
        hash_video([two]),
        hash_video([one, two]),
        hash_video([two, one]),
        hash_video([one, two, two]),
        hash_image(one),
        hash_video([np.asarray(one), np.asarray(two)]),
        hash_video(np.stack([np.asarray(one), np.asarray(two)])),
        hash_video(torch.from_numpy(np.stack([np.asarray(one), np.asarray(two)]))),
    )


def test_equal_sampling_in_other_types_and_order_is_the_same_video() -> None:
    frames = [torch.zeros(2, 2)]
    digest = hash_video(frames, fps=25, timestamps=[0, 1], frame_indices=[3, 4], sampling={"a": 1, "b": 2})
    assert digest == hash_video(
        tuple(frames),
        fps=Fraction(25),  # type: ignore[arg-type]
        timestamps=np.array([0.0, 1.0], "f4"),
        frame_indices=torch.tensor([3, 4]),
        sampling={"b": 2, "a": 1},
    )
    assert digest == hash_video(
        frames, fps=25.0, timestamps=(0, 1.0), frame_indices=range(3, 5), sampling={"a": 1, "b": 2}
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"frames": []}, "must have frames"),
        ({"frames": "video.mp4"}, "expected a PIL image"),
        ({"frames": b"bytes"}, "expected a PIL image"),
        ({"frames": [b"bytes"]}, "expected a PIL image"),
        ({"frames": [[1, 2]]}, "expected a PIL image"),
        ({"frames": picture()}, "not one image"),
        ({"fps": 0}, "fps must be above 0"),
        ({"fps": float("nan")}, "fps must be finite"),
        ({"timestamps": [float("inf")]}, "timestamps must be finite"),
        ({"timestamps": ["1"]}, "timestamps must be finite"),
        ({"timestamps": 1.0}, "sequence of numbers"),
        ({"frame_indices": [1.0]}, "frame_indices must hold ints"),
        ({"frame_indices": [True]}, "frame_indices must hold ints"),
        ({"frame_indices": [2**70]}, "video cannot be hashed"),
        ({"frame_indices": "12"}, "sequence of numbers"),
        ({"sampling": {"a": object()}}, "sampling holds"),
        ({"sampling": {1: 2}}, "sampling holds"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_video_of_wrong_frames_or_metadata_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidEntry, match=words):
        hash_video(**{"frames": [np.zeros((2, 2))], **changes})


# I3, I4: whole, and the same everywhere


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_no_two_contents_of_any_kind_share_a_hash(one: bytes, other: bytes) -> None:
    digests = [
        digest
        for data in {one, other}
        for digest in (
            hash_encoded(data),
            hash_encoded(data, "array"),
            hash_array(np.frombuffer(data, "u1")),
            hash_tensor(torch.tensor(list(data), dtype=torch.uint8)),
            hash_audio(np.frombuffer(data, "u1"), 1),
            hash_video([np.frombuffer(data, "u1")]),
        )
    ]
    assert distinct(*digests)


GOLDEN = {
    "image": "9d754c5b94564d6e96954351e64022705f52873d3eb4cf6f64175db3d071a870",
    "palette": "639e32f6b5e3758695e8702a12b786624c18fde0502b12902d0ac9efe6175575",
    "turned": "902b2fcdba49fd3314f960c9a9ccb6e0092e0937e406de1f3471edc238dabb53",
    "encoded": "85c60cf50b20208557f93c3fb51f59d0e853e0697a86e62842bd9437a3cd7f74",
    "array": "22e2e37ed0ebfb967c1198612a4ec01c7d05cca2d8b10ff388fac3f139427a1f",
    "tensor": "47110399fd0f74e0ca8eef90a32f53a35a1c901513bd0518b1418c99334e412a",
    "audio": "2811d964b07c9f7dd33ecfca1812f131b880d18dffa5c5796f210796bc9f1127",
    "video": "bfe5b2895da5e00b7b7b7498140ecd414992d031ea37eb66c210e43469a391c3",
}


def golden() -> dict[str, str]:
    image = picture()
    palette = picture("P")
    palette.putpalette(list(range(12)))
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    return {
        "image": hash_image(image),
        "palette": hash_image(palette),
        "turned": hash_image(oriented(6)),
        "encoded": hash_encoded(b"\xff\xd8\xff"),
        "array": hash_array(array),
        "tensor": hash_tensor(torch.from_numpy(array).to(torch.bfloat16)),
        "audio": hash_audio(array, 16000),
        "video": hash_video(
            [image, image], fps=2, timestamps=[0, 0.5], frame_indices=[0, 15], sampling={"duration": 4.0}
        ),
    }


def test_hashes_are_the_same_in_every_release() -> None:
    assert golden() == GOLDEN


def test_hashing_imports_neither_torch_nor_pillow() -> None:
    script = (
        "import sys, mmcache.hashing as h; print(h.hash_encoded(b'x'), 'torch' in sys.modules, 'PIL' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == [hash_encoded(b"x"), "False", "False"]
