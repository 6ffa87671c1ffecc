"""What the reaper's child and its parent tell each other is read strictly."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given

from mmcache.config import StoreSettings
from mmcache.control.messages import Commitment
from mmcache.controller.reaper.messages import (
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Describe,
    Described,
    Description,
    Failed,
    List,
    Listed,
    Remove,
    Removed,
    Renew,
    Renewed,
    decode_from_child,
    decode_to_child,
    encode,
)
from mmcache.controller.reconciliation import MOST_RECORDS, RECORD
from mmcache.controller.removals import BATCH
from mmcache.key import store_name_of
from mmcache.store.base import Outcome

LONGEST = store_name_of(b"\xff" * 64, lineage="z" * 32, generation=(1 << 63) - 1)
NUMBERS = st.integers(0, (1 << 63) - 1)
STORE = StoreSettings(master="10.0.0.5:1", sidecar="[::1]:2", attach="sidecar", devices="mlx5_0", lease=0.5)
TOO_LONG = [14, 1, bytes(MOST_RECORDS * RECORD.size + 1), True]
LIAR = [15, 1, [[["item", 7, 0, 8192, float("nan"), b""], "encoder", 0]]]
NOT_MESSAGES = (msgspec.MsgspecError, ValueError, RecursionError)


@example((1 << 63) - 1, [LONGEST] * BATCH)
@given(NUMBERS, st.lists(st.just(LONGEST), min_size=1, max_size=BATCH))
def test_a_batch_comes_back_as_it_was_and_fits(number: int, names: list[str]) -> None:
    remove = Remove(number, names)
    packet = encode(remove)
    assert len(packet) <= MAX_MESSAGE_BYTES
    assert decode_to_child(packet) == remove


@given(NUMBERS, st.lists(st.sampled_from(Outcome), min_size=1, max_size=BATCH))
def test_what_became_of_a_batch_comes_back_as_it_was(number: int, outcomes: list[Outcome]) -> None:
    removed = Removed(number, outcomes)
    assert decode_from_child(encode(removed)) == removed


@given(NUMBERS, st.binary(max_size=MOST_RECORDS * RECORD.size), st.booleans())
@example((1 << 63) - 1, bytes(MOST_RECORDS * RECORD.size), True)
def test_a_piece_of_a_list_comes_back_as_it_was_and_fits(number: int, records: bytes, last: bool) -> None:
    packet = encode(Listed(number, records, last))
    assert len(packet) <= MAX_MESSAGE_BYTES
    assert decode_from_child(packet) == Listed(number, records, last)


@example((1 << 63) - 1, [LONGEST] * BATCH)
@given(NUMBERS, st.lists(st.just(LONGEST), min_size=1, max_size=BATCH))
def test_a_batch_that_is_to_be_renewed_comes_back_as_it_was_and_fits(number: int, names: list[str]) -> None:
    packet = encode(Renew(number, names))
    assert len(packet) <= MAX_MESSAGE_BYTES
    assert decode_to_child(packet) == Renew(number, names)
    renewed = Renewed(number, [Outcome.OK, Outcome.NOT_FOUND, Outcome.UNAVAILABLE])
    assert decode_from_child(encode(renewed)) == renewed


def test_what_is_to_be_listed_comes_back_as_it_was() -> None:
    assert decode_to_child(encode(List(3, "[::1]:9003", "0a1b"))) == List(3, "[::1]:9003", "0a1b")


def test_a_batch_that_is_to_be_described_comes_back_as_it_was_and_fits() -> None:
    describe = Describe((1 << 63) - 1, "z" * 32, bytes(BATCH * RECORD.size))
    packet = encode(describe)
    assert len(packet) <= MAX_MESSAGE_BYTES
    assert decode_to_child(packet) == describe


def test_what_entries_are_comes_back_as_it_was() -> None:
    one = Description(Commitment("item", 7, 0, 8192, 2.5, b"info"), "encoder", -1)
    assert decode_from_child(encode(Described(1, [one, None]))) == Described(1, [one, None])


@pytest.mark.parametrize("message", [Attached("sidecar"), Failed("no master")])
def test_the_childs_other_words_come_back_as_they_were(message: object) -> None:
    assert decode_from_child(encode(message)) == message


def test_the_settings_come_back_as_they_were() -> None:
    assert decode_to_child(encode(Attach(STORE))) == Attach(STORE)


@pytest.mark.parametrize(
    "value",
    [
        [2, 1, []],
        [2, 1, ["a"] * (BATCH + 1)],
        [2, 1, [""]],
        [2, 1, ["a" * 257]],
        [2, 1, [b"a"]],
        [2, -1, ["a"]],
        [2, 1, ["a"], 1],
        [2, 1],
        [1, {"master": "nowhere"}],
        [1, {"master": "a:1", "attach": "sidecar"}],
        [13, 1, ["ok"]],
        [3, 1, "m:1"],
        [3, 1, "m:1", "a" * 33],
        [3, "1", "m:1", "a"],
        [4, 1, "a", b""],
        [4, 1, "a", bytes(BATCH * RECORD.size + 1)],
        [7],
        None,
    ],
)
def test_what_is_nothing_of_the_parents_is_refused(value: object) -> None:
    with pytest.raises(NOT_MESSAGES):
        decode_to_child(msgspec.msgpack.encode(value))


@pytest.mark.parametrize(
    "value", [[13, 1, ["fine"]], [13, 1, [0]], [13, 1, []], [12, "a" * 1025], [2, 1, ["a"]], TOO_LONG, LIAR, []]
)
def test_what_is_nothing_of_the_childs_is_refused(value: object) -> None:
    with pytest.raises(NOT_MESSAGES):
        decode_from_child(msgspec.msgpack.encode(value))


@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_a_message_or_refused(packet: bytes) -> None:
    for decode in (decode_to_child, decode_from_child):
        try:
            decode(packet)
        except NOT_MESSAGES:
            continue
