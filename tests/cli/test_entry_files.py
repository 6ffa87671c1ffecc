"""Safetensors files: what is no such file, or cannot be an entry, is refused by name; what is written is whole."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch
from commands import KEY, one_tensor, run, safetensors_bytes
from safetensors import safe_open

from mmcache.cli.entries import files
from mmcache.cli.entries.targets import check_target
from mmcache.cli.errors import InputError
from mmcache.entry import DTYPE_BYTES
from mmcache.errors import InvalidEntry

BAD = {
    "empty": (b"", "cannot be read as a safetensors file"),
    "no such format": (b"\x80\x04" + b"pickle" * 20, "cannot be read as a safetensors file"),
    "huge header": (struct.pack("<Q", 1 << 40) + b"{}", "header too large"),
    "header that is no JSON": (safetensors_bytes(b"{" * 64), "cannot be read as a safetensors file"),
    "truncated": (safetensors_bytes(one_tensor(), bytes(8)), "incomplete metadata, file not fully covered"),
    "no tensors": (safetensors_bytes({"__metadata__": {"format": "pt"}}), "holds no tensors"),
    "six-bit floats": (safetensors_bytes(one_tensor("F6_E2M3", 3), bytes(3)), "tensor 'embedding' cannot be read"),
    "unknown dtype": (safetensors_bytes(one_tensor("Q4", 16), bytes(16)), "unknown variant `Q4`"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_refused_by_its_name_before_any_connection(tmp_path: Path, kind: str) -> None:
    content, message = BAD[kind]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    ran = run("put", path, *KEY, "--mm-hash", "h", MMCACHE_STORE__MASTER="192.0.2.1:9")  # would time out
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"mmcache put: {path}: ")
    assert message in ran.err


def test_what_is_no_file_is_refused_and_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in [(tmp_path / "nowhere", "no such file"), (tmp_path, "is not a file")]:
        assert f"{path}: {message}" in run("put", path, *KEY, "--mm-hash", "h").err
    with pytest.raises(InputError, match="is not a file"):
        files.read(tmp_path / "pipe")


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES.keys() - {"complex32", "complex128"}))
def test_every_dtype_that_both_formats_have_survives_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip(f"this torch has no {dtype}")
    numbers = torch.arange(32, dtype=torch.uint8)
    tensor = numbers % 2 == 1 if dtype == "bool" else numbers.view(kind)
    files.write(tmp_path / "out.safetensors", {"a": tensor, "empty": tensor[:0]}, {})
    found = files.read(tmp_path / "out.safetensors").tensors
    assert found["a"].dtype == kind
    assert found["a"].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()
    assert found["empty"].shape == (0,)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex128])
def test_a_dtype_that_no_file_holds_is_named_and_nothing_written(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(InvalidEntry, match=f"tensor 'a' is of {dtype}, which a safetensors file cannot hold"):
        files.write(tmp_path / "out.safetensors", {"a": torch.zeros(2, dtype=dtype)}, {})
    assert os.listdir(tmp_path) == []


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.safetensors"
    path.write_bytes(b"old")

    def fail(tensors: object, draft: Path, metadata: object) -> None:
        draft.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(files, "save_file", fail)
    with pytest.raises(InputError, match="cannot be written: No space left"):
        files.write(path, {"a": torch.zeros(2)}, {})
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.safetensors"]


def test_a_written_file_is_for_whom_the_umask_says_and_replaces_what_a_link_names(tmp_path: Path) -> None:
    (tmp_path / "real.safetensors").write_bytes(b"old")
    (tmp_path / "link.safetensors").symlink_to("real.safetensors")
    previous = os.umask(0o027)
    try:
        files.write(check_target(tmp_path / "link.safetensors"), {"a": torch.zeros(2)}, {"note": "here"})
    finally:
        os.umask(previous)
    assert (tmp_path / "link.safetensors").is_symlink()
    assert (tmp_path / "real.safetensors").stat().st_mode & 0o777 == 0o640
    with safe_open(tmp_path / "real.safetensors", framework="pt") as file:
        assert file.metadata() == {"note": "here"}


@pytest.mark.parametrize(
    ("output", "message"),
    [("nowhere/out", "the directory .*nowhere is not there"), (".", "is there, and not a file")],
)
def test_an_output_that_could_not_be_written_is_refused_before_any_connection(
    tmp_path: Path, output: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_target(tmp_path / output)
    ran = run("get", *KEY, "--mm-hash", "h", "-o", tmp_path / output, MMCACHE_STORE__MASTER="192.0.2.1:9")
    assert (ran.status, ran.out) == (2, "")
    assert "--output" in ran.err
