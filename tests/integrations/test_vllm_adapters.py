from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_engines import adapter

from mmcache.integrations.vllm import adapters
from mmcache.integrations.vllm.adapters import (
    CHECK_S,
    MAX_ADAPTERS,
    MAX_AGE_S,
    PATIENCE_S,
    RETRY_S,
    AdapterUnreadable,
    LoraDigests,
    NoDigest,
    lora_digest,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def digests(clock: Clock) -> Iterator[LoraDigests]:
    made = LoraDigests(clock)
    yield made
    made.close()


def request(path: Path | str, number: int = 1, name: str = "style", *, inplace: bool = False) -> SimpleNamespace:
    return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=str(path), load_inplace=inplace)


def settled(digests: LoraDigests, of: SimpleNamespace) -> object:
    """The answer, once what was under way is done."""
    deadline = time.monotonic() + 60
    while True:
        answer = digests.digest(of)
        busy = any(known.checking for known in digests._adapters.values())
        if answer is not NoDigest.PENDING and not busy:
            return digests.digest(of)
        assert time.monotonic() < deadline
        time.sleep(0.001)  # for the thread that computes


def test_an_adapter_goes_by_what_is_in_it(tmp_path: Path) -> None:
    first = lora_digest(adapter(tmp_path / "a"))
    assert len(first) == 64
    assert lora_digest(adapter(tmp_path / "b")) == first
    assert lora_digest(str(adapter(tmp_path / "c", b"others"))) != first
    (tmp_path / "b" / "adapter_config.json").write_text('{"r": 16}')
    assert lora_digest(tmp_path / "b") != first


def test_the_names_of_its_files_count_and_so_does_where_one_ends(tmp_path: Path) -> None:
    found = {
        lora_digest(adapter(tmp_path / "a", b"weights", "adapter_model.bin")),
        lora_digest(adapter(tmp_path / "b", b"weights", "adapter_model.safetensors")),
    }
    found |= {lora_digest(adapter(tmp_path / name, b"weights", f"{name}.bin")) for name in ("c", "d")}
    split = adapter(tmp_path / "e", b"wei", "y.bin")
    (split / "z.bin").write_bytes(b"ghts")
    joined = adapter(tmp_path / "f", b"wei" + (5).to_bytes(8, "big") + b"z.bin" + b"ghts", "y.bin")
    assert len(found | {lora_digest(split), lora_digest(joined)}) == 6


def test_what_lies_beside_it_does_not_count(tmp_path: Path) -> None:
    before = lora_digest(adapter(tmp_path))
    for name in ("README.md", "optimizer.pt", "training_args.bin", "tokenizer.json"):
        (tmp_path / name).write_text("anything")
    assert lora_digest(tmp_path) == before


def test_a_file_that_was_replaced_in_its_size_and_time_is_read_again(tmp_path: Path) -> None:
    before = lora_digest(adapter(tmp_path, b"weights"))
    weights = tmp_path / "adapter_model.safetensors"
    status = weights.stat()
    (tmp_path / "new").write_bytes(b"WEIGHTS")
    (tmp_path / "new").replace(weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert lora_digest(tmp_path) != before


def test_files_that_are_the_same_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lora_digest(adapter(tmp_path))
    monkeypatch.setattr("builtins.open", lambda *_, **__: 1 / 0)
    assert lora_digest(tmp_path) == before


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("file")])
def test_a_missing_adapter_is_told_by_its_path(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "gone")
    with pytest.raises(AdapterUnreadable, match="gone"):
        lora_digest(tmp_path / "gone")


def test_what_is_neither_a_directory_nor_a_downloaded_repository_is_told_so() -> None:
    for name in ("org/no-such-adapter", "a/b/c", "no\0name"):
        with pytest.raises(AdapterUnreadable, match="nor a downloaded repository"):
            lora_digest(name)


def test_a_downloaded_repository_is_found_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = adapter(tmp_path / "models--org--style" / "snapshots" / ("0" * 40))
    refs = tmp_path / "models--org--style" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    assert lora_digest("org/style") == lora_digest(snapshot)


def test_an_adapter_that_changes_while_it_is_read_has_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter(tmp_path)
    signature = adapters._signature

    def growing(path: str | Path) -> object:
        with (tmp_path / "adapter_model.safetensors").open("ab") as file:
            file.write(b"x")
        return signature(path)

    monkeypatch.setattr(adapters, "_signature", growing)
    with pytest.raises(AdapterUnreadable, match="changed while it was read"):
        lora_digest(tmp_path)


def test_a_request_without_an_adapter_has_no_digest(digests: LoraDigests) -> None:
    assert digests.digest(None) is None


def test_a_digest_is_pending_until_it_is_computed(digests: LoraDigests, tmp_path: Path) -> None:
    of = request(adapter(tmp_path))
    assert digests.digest(of) is NoDigest.PENDING
    assert settled(digests, of) == lora_digest(tmp_path)


def test_the_caller_is_never_made_to_wait(
    digests: LoraDigests, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(adapters, "lora_digest", lambda _: hangs.wait(60))
    of = request(adapter(tmp_path))
    for _ in range(100):
        assert digests.digest(of) is NoDigest.PENDING
    assert digests._work.qsize() <= 1  # and asks once
    clock.now += PATIENCE_S
    assert digests.digest(of) is NoDigest.UNKNOWN  # nor is the request
    hangs.set()


def test_an_adapter_that_cannot_be_read_is_unknown_told_once_and_tried_again(
    digests: LoraDigests, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of = request(tmp_path / "late")
    assert settled(digests, of) is NoDigest.UNKNOWN
    clock.now += RETRY_S
    assert settled(digests, of) is NoDigest.UNKNOWN
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "late" in caplog.text
    assert digests.failures == 1
    adapter(tmp_path / "late")
    clock.now += CHECK_S
    assert settled(digests, of) is NoDigest.UNKNOWN  # not tried yet
    clock.now += RETRY_S
    assert settled(digests, of) == lora_digest(tmp_path / "late")


def test_an_adapter_that_changed_under_its_name_is_unknown_from_then_on(
    digests: LoraDigests, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of = request(adapter(tmp_path))
    before = settled(digests, of)
    adapter(tmp_path, b"other weights")
    clock.now += CHECK_S
    assert settled(digests, of) is NoDigest.UNKNOWN
    assert "are not what they were" in caplog.text
    adapter(tmp_path)  # the engine may have read the others meanwhile
    clock.now += 2 * RETRY_S
    assert settled(digests, of) is NoDigest.UNKNOWN
    assert digests.failures == 1
    assert settled(digests, request(tmp_path, number=2)) == before  # loaded anew


def test_an_old_answer_is_not_given_before_it_is_checked(digests: LoraDigests, clock: Clock, tmp_path: Path) -> None:
    of = request(adapter(tmp_path))
    before = settled(digests, of)
    clock.now += MAX_AGE_S
    assert digests.digest(of) is NoDigest.PENDING
    assert settled(digests, of) == before


def test_files_that_were_touched_only_are_the_same_adapter(digests: LoraDigests, clock: Clock, tmp_path: Path) -> None:
    of = request(adapter(tmp_path))
    before = settled(digests, of)
    os.utime(tmp_path / "adapter_model.safetensors", ns=(1, 1))
    clock.now += MAX_AGE_S
    assert settled(digests, of) == before


def test_an_adapter_that_could_not_be_read_for_a_while_is_known_again(
    digests: LoraDigests, clock: Clock, tmp_path: Path
) -> None:
    of = request(adapter(tmp_path / "a"))
    before = settled(digests, of)
    (tmp_path / "a").rename(tmp_path / "away")
    clock.now += CHECK_S
    assert settled(digests, of) is NoDigest.UNKNOWN
    (tmp_path / "away").rename(tmp_path / "a")
    clock.now += RETRY_S
    assert settled(digests, of) == before


def test_an_adapter_loaded_in_place_is_what_it_is_now(digests: LoraDigests, clock: Clock, tmp_path: Path) -> None:
    before = settled(digests, request(adapter(tmp_path)))
    adapter(tmp_path, b"other weights")
    again = request(tmp_path, inplace=True)
    assert digests.digest(again) is NoDigest.PENDING
    after = settled(digests, again)
    assert after == lora_digest(tmp_path) != before
    adapter(tmp_path, b"third weights")
    clock.now += 1.0
    assert digests.digest(again) is NoDigest.PENDING
    assert settled(digests, again) == lora_digest(tmp_path) != after


def test_a_request_for_what_a_number_meant_before_is_unknown(digests: LoraDigests, tmp_path: Path) -> None:
    old, new = request(adapter(tmp_path / "a")), request(adapter(tmp_path / "b", b"others"), inplace=True)
    first = settled(digests, old)
    second = settled(digests, new)
    assert first != second
    assert digests.digest(old) is NoDigest.UNKNOWN
    assert settled(digests, request(tmp_path / "a", inplace=True)) == first


def test_the_table_of_adapters_is_bounded(digests: LoraDigests, tmp_path: Path) -> None:
    for number in range(MAX_ADAPTERS + 50):
        digests.digest(request(tmp_path / f"no{number}", number=number + 1))
    assert len(digests._adapters) == len(digests._latest) == MAX_ADAPTERS


def test_nothing_is_known_after_close_and_no_thread_is_left(tmp_path: Path) -> None:
    digests = LoraDigests()
    of = request(adapter(tmp_path))
    digests.digest(of)
    thread = digests._thread
    assert thread is not None
    digests.close()
    digests.close()
    assert not thread.is_alive()
    assert digests.digest(of) is NoDigest.UNKNOWN
