"""Between engine and agent: every message survives the way, and nothing else is taken for one."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcache import EmbeddingKey
from mmcache.agent.messages import (
    MAX_ITEMS,
    MAX_MESSAGE_BYTES,
    AgentMessage,
    Ask,
    Drop,
    Encoded,
    EngineMessage,
    Figures,
    Granted,
    Item,
    Missing,
    Published,
    Ready,
    Started,
    Waiting,
    decode_agent_message,
    decode_engine_message,
    encode,
)

numbers = st.integers(0, (1 << 63) - 1)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=128)
shapes = st.lists(numbers, min_size=1, max_size=8)
fields = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=32)
hashes = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)
keys = st.builds(EmbeddingKey, fields, fields, hashes, st.none() | fields, fields, fields)
items = st.builds(
    Item,
    numbers,
    keys,
    numbers,
    numbers,
    numbers,
    st.lists(numbers, max_size=8),
    words,
    st.booleans(),
    st.floats(0.0, 3600.0),
)
engine_messages = (
    st.builds(Ask, st.lists(items, max_size=4))
    | st.builds(Encoded, numbers, shapes, words, st.floats(0.0, 3.6e6))
    | st.builds(Drop, st.lists(numbers, max_size=MAX_ITEMS))
)
agent_messages = (
    st.builds(Started, numbers)
    | st.builds(Ready, numbers, numbers, shapes, numbers, words)
    | st.builds(Granted, numbers)
    | st.builds(Waiting, numbers)
    | st.builds(Missing, numbers, words)
    | st.builds(Published, numbers, words, words)
    | st.builds(Figures, st.dictionaries(words, st.floats(allow_nan=False), max_size=8))
)


@given(engine_messages)
def test_what_an_engine_says_is_what_its_agent_hears(message: EngineMessage) -> None:
    assert decode_engine_message(encode(message)) == message


@given(agent_messages)
def test_what_an_agent_says_is_what_its_engine_hears(message: AgentMessage) -> None:
    assert decode_agent_message(encode(message)) == message


@given(st.binary(max_size=256))
def test_garbage_is_refused(packet: bytes) -> None:
    for decode in (decode_engine_message, decode_agent_message):
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):  # all that is caught of it
            decode(packet)


@given(engine_messages | agent_messages, st.data())
def test_a_packet_that_was_changed_is_a_message_or_refused(
    message: EngineMessage | AgentMessage, data: st.DataObject
) -> None:
    packet = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_engine_message, decode_agent_message):
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            decode(bytes(packet))


@given(engine_messages)
def test_neither_is_taken_for_the_others(message: EngineMessage) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_agent_message(encode(message))


@pytest.mark.parametrize(
    "message",
    [
        [1, [[0] * 9] * (MAX_ITEMS + 1)],
        [3, list(range(MAX_ITEMS + 1))],
        [3, [-1]],
        [3, [1 << 63]],
        [3, [1], 2],
        [3, "12"],
        [2, 1, [], "float32", 0.0],
        [2, 1, [1] * 9, "float32", 0.0],
        [2, 1, [1], "f" * 129, 0.0],
        [2, 1, [1], "float32", -1.0],
        [2, 1, [1], "float32", float("inf")],
        [12, 1],
        [],
        {},
    ],
    ids=lambda message: str(message)[:40],
)
def test_what_is_out_of_bounds_is_refused(message: object) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_engine_message(msgspec.msgpack.encode(message))


def test_the_largest_ask_fits_a_packet() -> None:
    key = EmbeddingKey("m" * 256, "v" * 128, "h" * 1024, "l" * 128, "x" * 32, "t" * 64)
    top = (1 << 63) - 1
    item = Item(top, key, top, top, top, [top] * 8, "w" * 128, True, 3600.0)
    assert len(encode(Ask([item] * MAX_ITEMS))) <= MAX_MESSAGE_BYTES
