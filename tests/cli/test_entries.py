"""`mmcache put`, `get` and `lookup` against a real cluster."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from cluster import free_port, wait_until
from commands import KEY, run
from safetensors.torch import load_file, save_file
from serving import Serving
from up_process import mmcache

from mmcache import EmbeddingKey
from mmcache.cli.entries import files
from mmcache.hashing import hash_encoded


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(segment_bytes=64 << 20) as cluster:
        yield cluster


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.safetensors"
    tensors = {"embedding": torch.randn(36, 64).bfloat16(), "deepstack_0": torch.randn(9, 64), "ids": torch.arange(5)}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_a_file_comes_back_bit_by_bit_with_both_kinds_of_metadata(serving: Serving, photo: Path) -> None:
    key = (*KEY, "--mm-hash", "round-trip")
    put = run("put", photo, *key, "--meta", "grid_thw=[1, 6, 6]", "--json", config=serving.config)
    assert (put.status, put.json["status"]) == (0, "stored")
    out = photo.with_name("out.safetensors")
    got = run("get", *key, "--output", out, "--json", config=serving.config)
    assert (got.status, got.json["status"], got.json["source"]) == (0, "hit", "store")
    assert got.json["meta"] == {"grid_thw": [1, 6, 6], "safetensors": {"format": "pt"}}
    original, copy = load_file(photo), load_file(out)
    assert copy.keys() == original.keys()
    assert all(torch.equal(copy[name], original[name]) for name in original)
    assert files.read(out).metadata == {"format": "pt", "mmcache.meta": '{"grid_thw":[1,6,6]}'}

    again = run("put", out, *KEY, "--mm-hash", "round-trip-2", "--json", config=serving.config)
    assert again.json["meta"] == got.json["meta"]


def test_an_engine_reads_what_was_put_and_get_what_an_engine_published(serving: Serving, photo: Path) -> None:
    image = photo.with_name("photo.jpg")
    image.write_bytes(b"the bytes of a JPEG")
    fields = ("--lora", "digest", "--modality", "video", "--tenant", "other")
    put = run("put", photo, *KEY, *fields, "--hash-file", image, config=serving.config)
    assert put.status == 0
    assert "embedding  bfloat16  36 x 64  4,608 bytes" in put.out
    mm_hash = hash_encoded(image.read_bytes(), kind="video")
    cache = serving.connect()
    found = cache.get(EmbeddingKey("encoder", "1", mm_hash, lora="digest", modality="video", tenant="other"))
    assert found is not None
    assert torch.equal(found.tensors["embedding"], load_file(photo)["embedding"])

    cache.put(EmbeddingKey("encoder", "1", "by-an-engine"), torch.ones(3, 5), meta={"num_tokens": 3})
    got = run("get", *KEY, "--mm-hash", "by-an-engine", config=serving.config)
    assert got.status == 0
    assert "embedding  float32  3 x 5  60 bytes" in got.out
    assert '{"num_tokens":3}' in got.out


def test_what_is_there_already_is_a_duplicate_and_stays(serving: Serving, photo: Path) -> None:
    key = (*KEY, "--mm-hash", "twice")
    assert run("put", photo, *key, config=serving.config).status == 0
    other = photo.with_name("other.safetensors")
    save_file({"other": torch.zeros(2)}, other)
    second = run("put", other, *key, "--json", config=serving.config)
    assert (second.status, second.json["status"]) == (0, "duplicate")
    assert {tensor["name"] for tensor in run("get", *key, "--json", config=serving.config).json["tensors"]} == {
        "embedding",
        "deepstack_0",
        "ids",
    }


def test_a_miss_says_who_knows_it_and_writes_nothing(serving: Serving, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    missed = run("get", *KEY, "--mm-hash", "nobody", "-o", out, config=serving.config)
    assert missed.status == 1
    assert "absent: neither the store nor the controller knows it" in missed.out
    assert not out.exists()
    assert run("get", *KEY, "--mm-hash", "nobody", "--json", config=serving.config).json["reason"] == "absent"


def test_lookup_tells_what_the_directory_knows_without_a_read(serving: Serving, photo: Path) -> None:
    key = (*KEY, "--mm-hash", "looked-up")
    assert run("lookup", *key, config=serving.config).status == 1
    run("put", photo, *key, config=serving.config)
    known = run("lookup", *key, "--json", config=serving.config, MMCACHE_STORE__MASTER="192.0.2.1:9")
    assert (known.status, known.json["status"], known.json["generation"]) == (0, "known", 0)
    assert known.json["nbytes"] > 4096
    assert {tensor["name"]: tensor["shape"] for tensor in known.json["tensors"]}["embedding"] == [36, 64]


def test_a_file_larger_than_the_configured_pool_is_put_all_the_same(serving: Serving, tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    save_file({"embedding": torch.zeros(1 << 20, dtype=torch.uint8)}, path)
    put = run("put", path, *KEY, "--mm-hash", "large", config=serving.config, MMCACHE_CLIENT__POOL_BYTES="64KiB")
    assert put.status == 0
    got = run("get", *KEY, "--mm-hash", "large", config=serving.config, MMCACHE_CLIENT__POOL_BYTES="64KiB")
    assert got.status == 1
    assert "larger_than_pool" in got.out
    assert "Raise client.pool_bytes (MMCACHE_CLIENT__POOL_BYTES=2GiB)" in got.out


def test_an_entry_larger_than_the_store_is_dropped_with_what_to_do(serving: Serving, tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    save_file({"embedding": torch.zeros(65 << 20, dtype=torch.uint8)}, path)
    put = run("put", path, *KEY, "--mm-hash", "huge", config=serving.config)
    assert put.status == 1
    assert "dropped" in put.out
    assert "no_space" in put.out
    assert "`mmcache stats` tells" in put.out


def test_metadata_that_does_not_fit_is_refused_and_can_be_left_out(serving: Serving, tmp_path: Path) -> None:
    path = tmp_path / "wordy.safetensors"
    save_file({"embedding": torch.zeros(4)}, path, metadata={"words": "x" * 8192})
    refused = run("put", path, *KEY, "--mm-hash", "wordy", config=serving.config)
    assert refused.status == 2
    assert "the largest first: meta" in refused.err
    assert run("put", path, *KEY, "--mm-hash", "wordy", "--no-file-metadata", config=serving.config).status == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mm-hash", "h", "--model", "two words"), "model may hold printable ASCII without spaces only"),
        (("--mm-hash", ""), "mm_hash must not be empty"),
        ((), "give either --mm-hash H or --hash-file ITEM"),
        (("--mm-hash", "h", "--hash-file", "x"), "give either --mm-hash H or --hash-file ITEM"),
        (("--hash-file", "/nowhere/photo.jpg"), "--hash-file /nowhere/photo.jpg: No such file or directory"),
    ],
)
@pytest.mark.parametrize("command", ["get", "lookup"])
def test_a_wrong_key_is_refused_by_its_field(command: str, options: tuple[str, ...], message: str) -> None:
    ran = run(command, *KEY, *options)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err


@pytest.mark.parametrize("command", ["get", "lookup", "stats"])
def test_a_wrong_setting_is_refused_with_its_line(command: str, tmp_path: Path) -> None:
    config = tmp_path / "client.yaml"
    config.write_text("store:\n  mastr: 127.0.0.1:1\n")
    ran = run(command, *(() if command == "stats" else (*KEY, "--mm-hash", "h")), "-c", config)
    assert ran.status == 2
    assert f"{config}:2: unknown setting store.mastr; did you mean store.master?" in ran.err


def test_with_nobody_there_each_command_says_who_is_missing_and_where(photo: Path) -> None:
    master, control = f"127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    environ = {"MMCACHE_STORE__MASTER": master, "MMCACHE_CONTROL__ADDRESS": control}
    key = (*KEY, "--mm-hash", "h")
    got = run("get", *key, "--json", **environ)
    assert (got.status, got.json["status"], got.json["reason"]) == (1, "miss", "unavailable")
    assert f"nobody accepts connections at {master}. Start it there, or correct store.master" in got.json["detail"]
    put = run("put", photo, *key, "--json", **environ)
    assert (put.status, put.json["status"], put.json["reason"]) == (1, "dropped", "unavailable")
    known = run("lookup", *key, "--json", **environ)
    assert (known.status, known.json["reason"]) == (1, "not_fresh")
    assert f"nobody accepts connections at {control}. Start `mmcache controller` there" in known.json["detail"]


def test_with_a_controller_that_is_stopped_put_and_get_end_soon_and_say_so(serving: Serving, photo: Path) -> None:
    process = serving.controller.process
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        got = run("get", *KEY, "--mm-hash", "h", "--json", config=serving.config)
        put = run("put", photo, *KEY, "--mm-hash", "h", "--json", config=serving.config)
    finally:
        process.send_signal(signal.SIGCONT)
    for ran, status in ((got, "miss"), (put, "dropped")):
        assert (ran.status, ran.json["status"], ran.json["reason"]) == (1, status, "not_fresh")
        assert "accepts connections and answers no hello" in ran.json["detail"]


def is_connected(pid: int, serving: Serving) -> bool:
    """Whether a process has a connection to the master."""
    port = int(serving.store.master.address.rpartition(":")[2])
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return any(connection.raddr and connection.raddr.port == port for connection in connections)


def test_ctrl_c_in_the_middle_ends_the_session_and_leaves_no_file(serving: Serving, tmp_path: Path) -> None:
    """The master stands still, so that the command is in the middle of connecting when the signal comes."""
    command, environment = mmcache(
        "get", *KEY, "--mm-hash", "h", "-o", str(tmp_path / "out.safetensors"), "-c", str(serving.config)
    )
    with serving.store.master.stopped():
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_until(lambda: is_connected(process.pid, serving), timeout=60, what="a connection to the master")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (128 + signal.SIGINT, b"")
    assert b"Traceback" not in err
    assert os.listdir(tmp_path) == []
