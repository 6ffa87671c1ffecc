"""`mmcache warm` against a real cluster: what somebody computed ahead is there for all, and no bad file stops it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import KEY, run
from safetensors.torch import save_file
from serving import Serving

from mmcache import EmbeddingKey, MMCache, Selector
from mmcache.cli.warm import embedding_file
from mmcache.cli.warm.embedding_file import Record


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(segment_bytes=64 << 20) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cache(serving: Serving) -> MMCache:
    return serving.connect(local_entries=False)


def precomputed(path: Path, value: float, **metadata: str) -> Path:
    save_file({"embedding": torch.full((4, 8), value)}, path, metadata=metadata or None)
    return path


def test_files_become_entries_by_their_names_or_what_they_say(serving: Serving, cache: MMCache, tmp_path: Path) -> None:
    named = precomputed(tmp_path / "by-name.safetensors", 1.0)
    saying = precomputed(tmp_path / "2.safetensors", 2.0, mm_hash="sha256/é", format="pt")
    scope = ("--lora", "digest", "--modality", "video", "--tenant", "other")
    ran = run("warm", named, saying, *KEY, *scope, "--cost-ms", "9.5", "--json", config=serving.config)
    assert ran.status == 0, ran.err
    assert ran.json == {
        "complete": True,
        "published": 2,
        "there_already": 0,
        "invalidated": 0,
        "bytes": named.stat().st_size + saying.stat().st_size,
        "failed": {},
    }
    for mm_hash, value, meta in [("by-name", 1.0, {}), ("sha256/é", 2.0, {"safetensors": {"format": "pt"}})]:
        found = cache.get(EmbeddingKey("encoder", "1", mm_hash, lora="digest", modality="video", tenant="other"))
        assert found is not None
        assert torch.equal(found.tensor, torch.full((4, 8), value))
        assert found.meta == meta

    again = run("warm", named, saying, *KEY, *scope, config=serving.config)
    assert (again.status, again.out) == (0, "published 0 entries, 0 B, from 2 files; 2 were there already\n")


def test_what_was_invalidated_before_is_the_operators_word_now(
    serving: Serving, cache: MMCache, tmp_path: Path
) -> None:
    path = precomputed(tmp_path / "renewed.safetensors", 3.0)
    cache.invalidate(Selector(mm_hash="renewed"), wait=True)
    assert run("warm", path, *KEY, config=serving.config).status == 0
    assert cache.get(EmbeddingKey("encoder", "1", "renewed")) is not None


def test_more_than_the_store_has_is_said_before(serving: Serving, tmp_path: Path) -> None:
    config = serving.write_config("measured.yaml", metrics=serving.store.metrics)
    few = [precomputed(tmp_path / "small.safetensors", 1.0)]
    large = torch.zeros(40 << 18)  # 40 MiB
    many = [tmp_path / f"large-{number}.safetensors" for number in range(2)]
    for path in many:
        save_file({"embedding": large}, path)
    said = "and the store has 64"
    assert said not in run("warm", *few, *KEY, config=config).err
    assert said in run("warm", *many, *KEY, config=config).err


def test_bad_files_are_named_and_the_others_go_on(serving: Serving, cache: MMCache, tmp_path: Path) -> None:
    good = precomputed(tmp_path / "good.safetensors", 4.0)
    truncated = precomputed(tmp_path / "truncated.safetensors", 5.0)
    truncated.write_bytes(truncated.read_bytes()[:-1])
    pickled = tmp_path / "pickled.safetensors"
    torch.save({"embedding": torch.zeros(2)}, pickled)
    os.mkfifo(tmp_path / "pipe")
    wordy = precomputed(tmp_path / "wordy.safetensors", 6.0, words="x" * 8192)
    nameless = precomputed(tmp_path / "nameless.safetensors", 7.0, mm_hash="")
    same = precomputed(tmp_path / "same.safetensors", 8.0, mm_hash="good")
    empty = tmp_path / "empty.safetensors"
    save_file({}, empty)
    bad = [truncated, pickled, tmp_path / "pipe", tmp_path / "nowhere", wordy, nameless, same, empty]
    ran = run("warm", *bad[:4], good, *bad[4:], *KEY, "--json", config=serving.config)
    assert ran.status == 1
    assert ran.json["failed"] == {"unreadable": 6, "invalid": 1, "same_key": 1}
    assert (ran.json["published"], ran.json["complete"]) == (1, True)
    for message in (
        f"{truncated}: cannot be read as a safetensors file",
        f"{pickled}: cannot be read as a safetensors file",
        f"{tmp_path / 'pipe'}: is not a file",
        f"{tmp_path / 'nowhere'}: no such file",
        f"{wordy}: the metadata takes",
        f"{nameless}: mm_hash must not be empty",
        f"{same}: has the mm_hash of {good}, 'good': publish one of them",
        f"{empty}: holds no tensors",
    ):
        assert message in ran.err
    found = cache.get(EmbeddingKey("encoder", "1", "good"))
    assert found is not None
    assert torch.equal(found.tensor, torch.full((4, 8), 4.0))


def test_an_export_among_them_is_taken_as_by_import(serving: Serving, cache: MMCache, tmp_path: Path) -> None:
    lineage = cache.mark().lineage
    cache.invalidate(Selector(mm_hash="withdrawn"), wait=True)
    head = cache.mark().number
    exports = {
        "current": exported(tmp_path, "current", lineage, head),
        "withdrawn": exported(tmp_path, "withdrawn", lineage, head - 1),
        "foreign": exported(tmp_path, "foreign", "f00d", 0),
        "future": exported(tmp_path, "future", lineage, head + 1),
        "other": exported(tmp_path, "other", lineage, 0, model="another"),
    }
    ran = run("warm", *exports.values(), *KEY, "--json", config=serving.config)
    assert ran.status == 1
    assert (ran.json["published"], ran.json["invalidated"]) == (1, 1)
    assert ran.json["failed"] == {"another_lineage": 2, "unreadable": 1}
    assert f"{exports['foreign']}: 1 entry of lineage f00d, while this controller's is {lineage}" in ran.err
    assert f"{exports['future']}: entries go with number {head + 1}" in ran.err
    assert f"{exports['other']}: is an export of another model than the options say" in ran.err
    keys = [EmbeddingKey("encoder", "1", mm_hash) for mm_hash in exports]
    assert [found is not None for found in cache.get_many(keys)] == [True, False, False, False, False]


def exported(folder: Path, mm_hash: str, lineage: str, generation: int, model: str = "encoder") -> Path:
    tensors = {"embedding": torch.ones(4)}
    key = EmbeddingKey(model, "1", mm_hash)
    record = Record(1, key, lineage, generation, tuple(tensors), 1.0, 0.0, 0.0, embedding_file.packed({}))
    path = folder / f"{mm_hash}.safetensors"
    path.write_bytes(embedding_file.encode(record, tensors))
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cost-ms", "-1"), "--cost-ms must be a number from 0 up"),
        (("--cost-ms", "nan"), "--cost-ms must be a number from 0 up"),
        (("--tenant", "two words"), "tenant may hold printable ASCII without spaces only"),
    ],
)
def test_wrong_options_are_refused_before_any_file(options: tuple[str, ...], message: str) -> None:
    ran = run("warm", "/nowhere", *KEY, *options)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err


def test_with_bad_files_alone_nobody_is_asked(tmp_path: Path) -> None:
    ran = run("warm", tmp_path / "nowhere", *KEY, MMCACHE_STORE__MASTER="192.0.2.1:9")
    assert (ran.status, ran.out) == (1, "published 0 entries, 0 B, from 1 file; 1 failed (unreadable)\n")
