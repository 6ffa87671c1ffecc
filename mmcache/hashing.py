"""Content hashes for callers that have no mm_hash: what an encoder would see, as 64 hex digits.

Each is BLAKE2b-256 over a msgpack header (kind, mode, shape, dtype, sampling metadata: typed and length-framed by its
nature) and the bytes, each after its length. So content of another mode, size, shape, dtype, rate or choice of frames
is other content, even where the bytes agree, and digests are the same in every process.

Equal digests mean equal content. The reverse is not promised: one picture as a PIL image, as its file's bytes and as an
array has three hashes, so a deployment picks one way and stays with it.
"""

from __future__ import annotations

import hashlib
import math
import numbers
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import msgspec
import numpy as np

from mmcache.errors import InvalidEntry
from mmcache.key import DIGEST_BYTES
from mmcache.plain import plain_fault

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    Array = np.ndarray[Any, Any]
    Frame = Image | Array | torch.Tensor

_ORIENTATION_TAG: Final = 0x0112
_encoder = msgspec.msgpack.Encoder(order="deterministic")


def hash_image(image: Image) -> str:
    """Hashes a PIL image: mode, size, palette, transparent colour, pixels, and its EXIF orientation.

    The orientation counts because some processors turn the image by it and others do not: with the tag and without,
    they may see different pictures. Other metadata (ICC profile, dates, …) changes nothing that an encoder sees. Of an
    animation it is the current frame.

    Raises:
        InvalidEntry: not a PIL image, or one that cannot be decoded.
    """
    if not _is_image(image):
        raise InvalidEntry(f"hash_image takes a PIL image, not {_type_name(image)}")
    try:
        image.load()  # first: mode, palette and metadata may change with it
    except (OSError, SyntaxError, ValueError) as error:
        raise InvalidEntry(f"the image cannot be decoded: {error}") from error
    palette = image.getpalette(rawmode=None)
    header = [
        "image",
        image.mode,
        image.size,
        None if palette is None or image.palette is None else [image.palette.mode, bytes(palette)],
        image.info.get("transparency"),
        _orientation(image),
    ]
    return _digest(header, image.tobytes())


def hash_encoded(data: bytes | bytearray | memoryview, kind: str = "image") -> str:
    """Hashes an encoded file (JPEG, PNG, MP4, WAV, …) as it is; `kind` keeps modalities apart.

    Raises:
        InvalidEntry: not bytes.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidEntry(f"hash_encoded takes bytes, bytearray or memoryview, not {_type_name(data)}")
    if type(kind) is not str or not kind:
        raise InvalidEntry(f"kind must be a str such as 'image', got {kind!r}")
    view = memoryview(data)
    return _digest(["encoded", kind], view if view.c_contiguous else view.tobytes())


def hash_array(array: Array) -> str:
    """Hashes a numpy array by dtype (byte order included), shape and values; strides do not matter.

    Raises:
        InvalidEntry: not an array, a masked one, or of a dtype whose bytes are not its values (objects, records,
            long doubles).
    """
    if not isinstance(array, np.ndarray):
        raise InvalidEntry(f"hash_array takes a numpy array, not {_type_name(array)}")
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidEntry("hash_array does not take masked arrays: fill them first")
    dtype = array.dtype
    if dtype.hasobject or dtype.names is not None or not dtype.itemsize or dtype.char in "gG":
        raise InvalidEntry(f"an array of dtype {dtype} cannot be hashed by its bytes")
    # both names of the dtype: the first has the byte order, the second tells extension types (bfloat16, …) apart
    header = ["array", dtype.str, str(dtype), list(array.shape)]
    return _digest(header, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def hash_tensor(tensor: torch.Tensor) -> str:
    """Hashes a torch tensor by dtype, shape and values, wherever it is; strides do not matter.

    Raises:
        InvalidEntry: not a tensor, or one without plain bytes (meta, sparse, quantised, nested, fake).
    """
    if not _is_tensor(tensor):
        raise InvalidEntry(f"hash_tensor takes a torch tensor, not {_type_name(tensor)}")
    torch = sys.modules["torch"]
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided:
        raise InvalidEntry("a meta, sparse, quantised or nested tensor cannot be hashed by its bytes")
    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        flat = plain.as_strided((plain.numel(),), (1,))  # reshape may leave one element a stride of its own
        content = flat.view(torch.uint8).numpy().data
    except (RuntimeError, TypeError) as error:
        raise InvalidEntry(f"a tensor of {tensor.dtype} cannot be read as bytes: {error}") from error
    return _digest(["tensor", str(tensor.dtype), sys.byteorder, list(tensor.shape)], content)


def hash_audio(samples: Array | torch.Tensor, sampling_rate: float) -> str:
    """Hashes audio samples, of any shape and dtype, with their sampling rate in Hz.

    Raises:
        InvalidEntry: as `hash_array` and `hash_tensor`; or a rate that is not a finite number above 0.
    """
    if _is_image(samples):
        raise InvalidEntry("hash_audio takes a numpy array or torch tensor, not an image")
    return _digest(["audio", _positive("sampling_rate", sampling_rate), _hash_frame(samples)])


def hash_video(
    frames: Array | torch.Tensor | Sequence[Frame],
    *,
    fps: float | None = None,
    timestamps: Iterable[float] | None = None,
    frame_indices: Iterable[int] | None = None,
    sampling: Mapping[str, object] | None = None,
) -> str:
    """Hashes decoded frames with all that says which moments they show.

    Args:
        frames: one array or tensor of all frames, or a list or tuple of images, arrays or tensors.
        fps: frames a second, if the processor uses it.
        timestamps: seconds at which frames (or groups of them) were taken.
        frame_indices: which frames of the source these are.
        sampling: anything else that the processor uses (`total_num_frames`, `duration`, …): plain data.

    Raises:
        InvalidEntry: no frames, frames of a wrong type, or metadata that is not of finite numbers and plain data.
    """
    if isinstance(frames, list | tuple):
        if not frames:
            raise InvalidEntry("a video must have frames")
        content: object = [_hash_frame(frame) for frame in frames]
    elif _is_image(frames):
        raise InvalidEntry("hash_video takes an array, a tensor or a list of frames, not one image")
    else:
        content = _hash_frame(frames)
    if sampling is not None:
        sampling = dict(sampling)
        if fault := plain_fault(sampling):
            raise InvalidEntry(f"sampling {fault}")
    header = [
        "video",
        None if fps is None else _positive("fps", fps),
        None if timestamps is None else [_finite("timestamps", item) for item in _listed(timestamps)],
        None if frame_indices is None else [_integer("frame_indices", item) for item in _listed(frame_indices)],
        sampling,
        content,
    ]
    return _digest(header)


def _digest(header: list[object], content: bytes | memoryview = b"") -> str:
    try:
        encoded = _encoder.encode(header)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidEntry(f"the metadata of this {header[0]} cannot be hashed: {error}") from error
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"mmc1.content")
    for part in (memoryview(encoded), memoryview(content)):
        hasher.update(part.nbytes.to_bytes(8, "big"))
        hasher.update(part)
    return hasher.hexdigest()


def _hash_frame(frame: object) -> str:
    if _is_image(frame):
        return hash_image(frame)
    if _is_tensor(frame):
        return hash_tensor(frame)
    if isinstance(frame, np.ndarray):
        return hash_array(frame)
    raise InvalidEntry(f"expected a PIL image, numpy array or torch tensor, got {_type_name(frame)}")


def _is_image(value: object) -> TypeGuard[Image]:
    module = sys.modules.get("PIL.Image")  # whoever has an image has imported Pillow
    return module is not None and isinstance(value, module.Image)


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    module = sys.modules.get("torch")
    return module is not None and isinstance(value, module.Tensor)


def _orientation(image: Image) -> int:
    """1 to 8; 1 also where there is none, or none that could be read and so applied."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # noqa: BLE001 (Pillow raises whatever malformed EXIF leads to, here and where the image is turned)
        return 1
    return int(orientation) if orientation in range(1, 9) else 1


def _listed(values: Iterable[object]) -> list[object]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidEntry(f"expected a sequence of numbers, got {_type_name(values)}")
    if _is_tensor(values) or isinstance(values, np.ndarray):
        return list(values.reshape(-1).tolist())
    return list(values)


def _finite(name: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidEntry(f"{name} must be finite, got {value!r}")
    return number


def _positive(name: str, value: object) -> float:
    number = _finite(name, value)
    if number <= 0:
        raise InvalidEntry(f"{name} must be above 0, got {value!r}")
    return number


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidEntry(f"{name} must hold ints, got {value!r}")
    return int(value)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
