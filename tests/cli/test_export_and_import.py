"""`mmcache export` and `import` against a real cluster: what comes back, bit by bit, and what must not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cluster import wait_until
from commands import Ran, run
from safetensors.torch import save_file
from serving import Serving, key_of, name_of, store_of

from mmcache import EmbeddingKey, MMCache, Selector
from mmcache.cli.warm import embedding_file, exporting
from mmcache.cli.warm.choosing import Listed
from mmcache.cli.warm.directory import ExportDirectory
from mmcache.cli.warm.telling import Progress
from mmcache.cli.warm.transfers import Transfers
from mmcache.key import store_name
from mmcache.store.base import Outcome
from mmcache.store.launch import segments

TOKEN = "viewer-" + "v" * 20
TOKENS = f"- {{name: grafana, role: viewer, token: {TOKEN}}}"
META: dict[str, object] = {"grid_thw": [1, 6, 6], "bytes": b"\x00\xff", "text": "é"}


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(segment_bytes=64 << 20, lease_ms=500, admin_tokens=TOKENS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cache(serving: Serving) -> MMCache:
    return serving.connect(name="encoder-0", local_entries=False)


def ask(serving: Serving, *arguments: str | Path, **environ: str | None) -> Ran:
    return run(
        *arguments,
        config=serving.config,
        MMCACHE_CONTROL__ADMIN=serving.controller.admin,
        MMCACHE_TOKEN=TOKEN,
        **environ,
    )


def export(serving: Serving, directory: Path, model: str, *options: str) -> dict[str, Any]:
    ran = ask(serving, "export", directory, "--model", model, "--json", *options)
    assert ran.status == 0, ran.err
    assert ran.json.pop("complete")
    assert not ran.json["failed"], ran.err
    return ran.json


def bring_back(serving: Serving, directory: Path, *options: str) -> dict[str, Any]:
    ran = ask(serving, "import", directory, "--json", *options)
    assert ran.status == 0, ran.err
    assert ran.json["complete"]
    return ran.json


def publish(cache: MMCache, model: str, count: int, *, cost_ms: float = 3.5) -> list[EmbeddingKey]:
    keys = [key_of(number, model=model) for number in range(count)]
    results = cache.put_many([(key, torch.full((4, 8), float(n))) for n, key in enumerate(keys)], cost_ms=cost_ms)
    assert all(result.readable for result in results)
    return keys


def lose(cache: MMCache, keys: list[EmbeddingKey], generation: int = 0) -> None:
    """Have the store lose entries, of which the controller hears nothing."""
    names = [name_of(cache, key, generation) for key in keys]

    def removed() -> bool:
        outcomes = store_of(cache).remove(names, deadline=time.monotonic() + 60)
        return all(outcome in (Outcome.OK, Outcome.NOT_FOUND) for outcome in outcomes)

    wait_until(removed, timeout=60, what="the end of all leases")


def test_what_the_store_lost_comes_back_bit_by_bit_with_all_that_was_known_of_it(
    serving: Serving, cache: MMCache, tmp_path: Path
) -> None:
    key = EmbeddingKey("round", "1", "item/é", lora="digest", modality="video", tenant="other")
    tensors = {"z": torch.randn(36, 64).bfloat16(), "a": torch.randn(9, 64), "ids": torch.arange(5)}
    assert cache.put(key, tensors, meta=META, cost_ms=12.5).readable
    told = export(serving, tmp_path / "out", "round")
    assert (told["exported"], told["there_already"], told["left_out"]) == (1, 0, 0)
    lose(cache, [key])
    assert cache.get(key) is None

    told = bring_back(serving, tmp_path / "out")
    assert (told["published"], told["there_already"], told["failed"]) == (1, 0, {})
    found = cache.get(key)
    assert found is not None
    assert list(found.tensors) == ["z", "a", "ids"]
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)
    assert found.meta == META
    [row] = ask(serving, "entries", "--model", "round", "--json").out.splitlines()
    assert msgspec.json.decode(row)["cost_ms"] == 12.5


def test_both_go_on_where_they_ended(serving: Serving, cache: MMCache, tmp_path: Path) -> None:
    keys = publish(cache, "resumed", 6)
    out = tmp_path / "out"
    first = export(serving, out, "resumed", "--limit", "2")
    assert (first["exported"], first["left_out"]) == (2, 4)
    torn = sorted(out.iterdir())[0]
    torn.write_bytes(torn.read_bytes()[:-1])
    assert export(serving, out, "resumed")["exported"] == 5
    again = export(serving, out, "resumed")
    assert (again["exported"], again["there_already"]) == (0, 6)
    assert len(list(out.iterdir())) == 6

    lose(cache, keys[:3])
    told = bring_back(serving, out)
    assert (told["published"], told["there_already"]) == (3, 3)
    assert bring_back(serving, out)["there_already"] == 6
    assert all(cache.get_many(keys))


@pytest.mark.parametrize("when", ["before the export", "after it", "after it, and published anew"])
def test_what_was_invalidated_does_not_come_back(serving: Serving, cache: MMCache, tmp_path: Path, when: str) -> None:
    model = when.replace(" ", "-").replace(",", "")
    gone, kept = publish(cache, model, 2)
    if when == "before the export":
        cache.invalidate(Selector.exactly(gone), wait=True)
    told = export(serving, tmp_path, model)
    assert told["exported"] == (1 if when == "before the export" else 2)
    if when != "before the export":
        made = cache.invalidate(Selector.exactly(gone), wait=True)
        assert made.complete
    new = torch.full((4, 8), 77.0)
    if when.endswith("anew"):
        cache.put(gone, new)
        lose(cache, [gone], generation=made.number)
    lose(cache, [kept])
    told = bring_back(serving, tmp_path)
    assert (told["published"], told["invalidated"]) == (1, 0 if when == "before the export" else 1)
    assert cache.get(gone) is None
    assert cache.get(kept) is not None


def test_the_hottest_come_first_and_limits_hold(serving: Serving, cache: MMCache, tmp_path: Path) -> None:
    model = "ordered"
    for number, cost in enumerate([5.0, 500.0, 50.0]):
        assert cache.put(key_of(number, model=model), torch.zeros(64), cost_ms=cost).readable
    export(serving, tmp_path / "hottest", model, "--limit", "2")
    assert items(tmp_path / "hottest") == {"item-1", "item-2"}
    export(serving, tmp_path / "newest", model, "--limit", "1", "--order", "newest")
    assert items(tmp_path / "newest") == {"item-2"}
    export(serving, tmp_path / "small", model, "--limit-bytes", "9000B")
    assert items(tmp_path / "small") == {"item-1", "item-2"}


def items(directory: Path) -> set[str]:
    records = [embedding_file.peek(path).record for path in directory.iterdir()]
    return {record.key.mm_hash for record in records if record is not None}


def test_files_of_no_use_are_named_and_the_others_come_back(serving: Serving, cache: MMCache, tmp_path: Path) -> None:
    keys = publish(cache, "damaged", 4)
    export(serving, tmp_path, "damaged")
    lose(cache, keys)
    truncated, flipped, *_ = sorted(tmp_path.iterdir())
    truncated.write_bytes(truncated.read_bytes()[:-1])
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    (tmp_path / "words.safetensors").write_bytes(b"\x80\x04pickle")
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "readme.txt").write_text("not looked at")
    ran = ask(serving, "import", tmp_path, "--json")
    assert ran.status == 1
    assert ran.json["failed"] == {"unreadable": 3, "no_export": 1}
    assert (ran.json["published"], ran.json["complete"]) == (2, True)
    assert f"{truncated}: cannot be read as a safetensors file" in ran.err
    assert f"{flipped}: is damaged: what it holds is not what was exported" in ran.err
    assert f"{tmp_path / 'words.safetensors'}: cannot be read" in ran.err
    assert f"{tmp_path / 'other.safetensors'}: is no export: `mmcache warm`" in ran.err
    assert sum(found is not None for found in cache.get_many(keys)) == 2


def test_a_number_that_the_controller_never_gave_shows_that_its_state_is_old(
    serving: Serving, cache: MMCache, tmp_path: Path
) -> None:
    publish(cache, "future", 1)
    export(serving, tmp_path, "future")
    [path] = tmp_path.iterdir()
    rewrite(path, generation=1 << 40)
    ran = ask(serving, "import", tmp_path)
    assert (ran.status, ran.out) == (2, "")
    assert "its state is older than the export" in ran.err


def test_another_lineage_is_refused_as_a_whole_unless_it_is_named(
    serving: Serving, cache: MMCache, tmp_path: Path
) -> None:
    gone, kept, now = publish(cache, "foreign", 3)
    export(serving, tmp_path, "foreign")
    lose(cache, [gone, kept, now])
    for path in tmp_path.iterdir():
        record = embedding_file.peek(path).record
        assert record is not None
        if record.key != now:
            rewrite(path, lineage="f00d")
    cache.invalidate(Selector.exactly(gone), wait=True)
    for options in ((), ("--trust-lineage", "beef")):
        ran = ask(serving, "import", tmp_path, *options)
        assert (ran.status, ran.out) == (2, "")
        assert "2 entries of lineage f00d, while this controller's is" in ran.err
        assert "`mmcache import --trust-lineage f00d`" in ran.err
        assert cache.get_many([gone, kept, now]) == [None] * 3

    told = bring_back(serving, tmp_path, "--trust-lineage", "f00d")
    assert (told["published"], told["invalidated"]) == (2, 1)
    assert [found is not None for found in cache.get_many([gone, kept, now])] == [False, True, True]

    ran = ask(serving, "export", tmp_path, "--model", "foreign")
    assert (ran.status, ran.out) == (2, "")
    assert "Give a directory that is empty, or holds exports of this controller alone" in ran.err


def rewrite(path: Path, **fields: Any) -> None:
    """Have an export say something else, with a checksum that fits."""
    peek = embedding_file.peek(path)
    assert peek.record is not None
    file = embedding_file.read(path, peek.record)
    record = msgspec.structs.replace(file.record, **fields)
    tensors = {name: tensor.clone() for name, tensor in file.tensors.items()}
    del file
    path.unlink()
    name = path.name
    if "lineage" in fields:
        name = name.replace(peek.record.lineage, fields["lineage"])
    path.with_name(name).write_bytes(embedding_file.encode(record, tensors))


def test_a_list_that_is_ahead_of_the_client_or_behind_it_makes_no_file_that_outlives_an_invalidation(
    serving: Serving, cache: MMCache, tmp_path: Path
) -> None:
    """What the controller lists and what the client reads are told at different times."""
    ahead, behind = publish(cache, "timing", 2)
    before = cache.mark()
    made = cache.invalidate(Selector.exactly(behind), wait=True)
    assert cache.put(behind, torch.zeros(2)).readable
    transfers = Transfers(cache, pool_bytes=1 << 20)
    progress = Progress("exported", {"gone": ""})
    with ExportDirectory(tmp_path) as target:
        one = exporting._Export(cache, transfers, target, progress)
        for key, generation in ((ahead, made.number + 1), (behind, 0)):
            name = store_name(key, lineage=before.lineage, generation=generation)
            one._carry(Listed(name, key, generation, nbytes=4096, created=0.0))
    [path] = tmp_path.iterdir()
    record = embedding_file.peek(path).record
    assert record is not None
    assert (record.key, record.generation) == (behind, 0)
    lose(cache, [behind], generation=made.number)
    assert bring_back(serving, tmp_path)["invalidated"] == 1


def test_a_list_of_another_controller_is_not_exported(serving: Serving, cache: MMCache, tmp_path: Path) -> None:
    publish(cache, "elsewhere", 1)
    with Serving(segment_bytes=16 << 20) as other:
        ran = run(
            "export",
            tmp_path / "out",
            "--admin",
            serving.controller.admin,
            config=other.config,
            MMCACHE_TOKEN=TOKEN,
        )
    assert ran.status == 1
    assert "--admin or control.admin is another one's" in ran.err
    assert list((tmp_path / "out").iterdir()) == []


def test_nothing_to_do_is_no_error_and_needs_no_store(serving: Serving, tmp_path: Path) -> None:
    nowhere = {"MMCACHE_STORE__MASTER": "192.0.2.1:9"}
    ran = ask(serving, "export", tmp_path / "out", "--model", "nobody", **nowhere)
    assert (ran.status, ran.out) == (0, f"exported 0 entries, 0 B, to {tmp_path / 'out'}\n")
    ran = ask(serving, "import", tmp_path / "out", **nowhere)
    assert (ran.status, ran.out) == (0, f"published 0 entries, 0 B, from {tmp_path / 'out'}\n")
    assert "there are no exports here" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "DIR", "--order", "coldest"), "--order must be hottest or newest"),
        (("export", "DIR", "--limit-bytes", "10 boxes"), "--limit-bytes must be bytes or a size"),
        (("export", "DIR", "--lora", "a", "--no-lora"), "give either --lora D or --no-lora"),
        (("export", "FILE"), "FILE: cannot be used as a directory"),
        (("export", "DIR/not/there"), "cannot be used as a directory: No such file"),
        (("import", "DIR/there"), "DIR/there: cannot be read as a directory: No such file"),
    ],
)
def test_wrong_options_are_refused(serving: Serving, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "FILE").touch()
    places = [str(tmp_path / one) if one.partition("/")[0] in ("DIR", "FILE") else one for one in arguments]
    ran = ask(serving, *places)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err.replace(f"{tmp_path}/", "")


def test_a_cluster_that_is_not_there_is_named(serving: Serving, cache: MMCache, tmp_path: Path) -> None:
    publish(cache, "alone", 1)
    export(serving, tmp_path, "alone")
    ran = ask(serving, "import", tmp_path, MMCACHE_STORE__MASTER="127.0.0.1:9")
    assert ran.status == 1
    assert "nobody accepts connections at 127.0.0.1:9" in ran.err


def test_a_store_that_lost_all_is_warm_again_before_the_controller_notices(tmp_path: Path) -> None:
    with Serving(segment_bytes=32 << 20, durable=True, admin_tokens=TOKENS) as serving:
        cache = serving.connect(local_entries=False)
        keys = publish(cache, "warm", 20)
        cache.invalidate(Selector.exactly(keys[0]), wait=True)
        assert export(serving, tmp_path, "warm")["exported"] == 19
        serving.close_caches()
        master, metrics = serving.store.master, serving.store.metrics
        master.kill()
        serving.store.restart(master)
        wait_until(lambda: bool(segments(metrics)), timeout=60, what="the owner's return")

        assert serving.connect(local_entries=False).get_many(keys) == [None] * 20
        told = bring_back(serving, tmp_path)
        assert (told["published"], told["there_already"]) == (19, 0)
        found = serving.connect(local_entries=False).get_many(keys)
    assert found[0] is None
    assert all(
        one is not None and torch.equal(one.tensor, torch.full((4, 8), float(n)))
        for n, one in enumerate(found[1:], start=1)
    )
