"""What was read is told with the next heartbeat: all of it, once, within the bounds of a message."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_controller import PATIENCE_S, TERM, ScriptedController, key

from mmcache.control.channel import ControlChannel
from mmcache.control.messages import (
    MAX_BATCH,
    MAX_MESSAGE_BYTES,
    MAX_USES,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    Lookup,
    MalformedMessage,
    Used,
    decode_from_client,
    encode,
)
from mmcache.control.tally import MAX_TALLIED, Tally
from mmcache.errors import DeadlineExceeded
from mmcache.key import EmbeddingKey
from mmcache.metrics import Counters

SCOPE = b"s" * 32
DIGEST = b"d" * 32
LARGEST = (1 << 63) - 1
keys = st.builds(lambda model, name: key(name, model=model), st.sampled_from("abc"), st.sampled_from("abcdefgh"))


def uses_of(used: Used) -> dict[tuple[bytes, bytes], int]:
    """The counts, each digest of a scope in one group and once."""
    counts = {}
    for group in used.groups:
        for digest, count in zip(group.digests, group.counts, strict=True):
            assert (group.scope, digest) not in counts
            counts[group.scope, digest] = count
    return counts


def named(key: EmbeddingKey) -> tuple[bytes, bytes]:
    return key.scope.digest, key.mm_digest


def taken(tally: Tally) -> Used:
    used = tally.take(1, 2)
    assert used is not None
    return used


@given(st.lists(st.one_of(st.lists(keys), st.integers(0, 5), st.none()), max_size=30))
def test_all_that_was_found_and_missed_is_told_once(steps: list[list[EmbeddingKey] | int | None]) -> None:
    tally = Tally()
    told: Counter[tuple[bytes, bytes]] = Counter()
    missed = 0
    for step in [*steps, None]:
        if step is None:
            used = tally.take(1, 2)
            if used is not None:
                assert decode_from_client(encode(used)) == used
                told.update(uses_of(used))
                missed += used.missed
        elif isinstance(step, int):
            tally.missed(step)
        else:
            tally.found(step)
    assert told == Counter(named(one) for step in steps if isinstance(step, list) for one in step)
    assert missed == sum(step for step in steps if isinstance(step, int))
    assert tally.take(1, 2) is None


def test_what_is_beyond_the_bound_is_counted_and_not_told() -> None:
    counters = Counters()
    tally = Tally(counters)
    tally.found(EmbeddingKey("m" * 64, "v", f"item-{number}") for number in range(MAX_TALLIED))
    known, beyond = EmbeddingKey("m" * 64, "v", "item-0"), EmbeddingKey("m" * 64, "v", "one more")
    tally.found([beyond, known, beyond])
    used = taken(tally)
    assert len(encode(used)) < MAX_MESSAGE_BYTES
    counts = uses_of(used)
    assert len(counts) == MAX_TALLIED
    assert counts[named(known)] == 2
    assert named(beyond) not in counts
    assert counters.snapshot() == {"untold": 2}
    tally.found([beyond])
    assert uses_of(taken(tally)) == {named(beyond): 1}, "there is room again"


def test_the_largest_tally_fits_into_a_message() -> None:
    tally = Tally()
    tally.found(EmbeddingKey(f"model-{number}", "v", "one") for number in range(MAX_TALLIED))
    tally.missed(1 << 40)
    used = msgspec.structs.replace(taken(tally), term=LARGEST, session=LARGEST)
    assert used.missed == MAX_USES
    assert len(used.groups) == MAX_TALLIED, "each in a scope of its own"
    frame = encode(used)
    assert len(frame) + 4 * MAX_TALLIED < MAX_MESSAGE_BYTES, "with the largest counts as well"
    assert decode_from_client(frame) == used


def test_what_one_thread_takes_while_another_tallies_loses_nothing() -> None:
    tally = Tally()
    told: list[Used] = []
    taker = threading.Thread(target=lambda: told.append(taken(tally)))

    def read() -> Iterator[EmbeddingKey]:
        yield key("a")
        taker.start()
        taker.join(0.3)  # it cannot end before this has, unless it takes what is being tallied
        yield key("b")

    tally.found(read())
    taker.join()
    assert uses_of(told[0]) == {named(key("a")): 1, named(key("b")): 1}


@pytest.mark.parametrize(
    "fields",
    [
        [[[SCOPE, [DIGEST], [0]]], 0],
        [[[SCOPE, [DIGEST], [-1]]], 0],
        [[[SCOPE, [DIGEST], [MAX_USES + 1]]], 0],
        [[[SCOPE, [DIGEST], [1.5]]], 0],
        [[[SCOPE, [DIGEST], [True]]], 0],
        [[[SCOPE, [DIGEST], [1, 1]]], 0],
        [[[SCOPE, [DIGEST, DIGEST], [1]]], 0],
        [[[SCOPE, [], []]], 0],
        [[[SCOPE[1:], [DIGEST], [1]]], 0],
        [[[SCOPE, [DIGEST + b"d"], [1]]], 0],
        [[[SCOPE, [DIGEST], [1], 1]], 0],
        [[[SCOPE, [DIGEST], [1]]], -1],
        [[[SCOPE, [DIGEST], [1]]], MAX_USES + 1],
        [[[SCOPE, [DIGEST], [1]]]],
        [[[SCOPE, [DIGEST], [1]]], 0, 0],
        [[[SCOPE, [DIGEST] * (MAX_BATCH + 1), [1] * (MAX_BATCH + 1)]], 0],
        [[[SCOPE, [DIGEST], [1]]] * (MAX_BATCH + 1), 0],
        [[[SCOPE, [DIGEST] * 2, [1] * 2], [SCOPE, [DIGEST] * (MAX_BATCH - 1), [1] * (MAX_BATCH - 1)]], 0],
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_what_is_out_of_bounds_is_no_message(fields: list[object]) -> None:
    with pytest.raises(MalformedMessage):
        decode_from_client(msgspec.msgpack.encode([17, TERM, 1, *fields]))
    good = [17, TERM, 1, [[SCOPE, [DIGEST], [MAX_USES]]], MAX_USES]
    assert isinstance(decode_from_client(msgspec.msgpack.encode(good)), Used)


def test_it_is_told_with_the_heartbeat_and_what_came_without_a_session_with_the_next_one() -> None:
    controller = ScriptedController(ttl_ms=2000)
    tally = Tally()
    tally.found([key("before")])
    channel = ControlChannel(controller.address, name="teller", tally=tally)
    channel.start()
    try:
        controller.welcome()
        first = controller.expect(Used)
        assert (first.term, first.session) == (TERM, controller.session)
        assert uses_of(first) == {named(key("before")): 1}
        controller.answer_heartbeats = False  # so the session ends; and nothing is told while there is none
        tally.missed(3)
        while not isinstance(message := controller.receive(), Hello):
            assert message is not None, "the session did not end"
            if isinstance(message, Used):
                assert (message.groups, message.missed) == ([], 3), "before the end, with the next heartbeat"
        assert not channel._link.connected
        tally.found([key("meanwhile")])
        controller.answer_heartbeats = True
        controller.send_welcome()
        assert uses_of(controller.expect(Used)) == {named(key("meanwhile")): 1}
        tally.found([key("last")])
    finally:
        channel.close()
    last = controller.receive()
    assert isinstance(last, Used)
    assert uses_of(last) == {named(key("last")): 1}, "also where its session ends before another heartbeat"
    assert isinstance(controller.receive(), Goodbye)
    controller.close()


def test_while_nobody_answers_it_is_kept() -> None:
    controller = ScriptedController(ttl_ms=8000)
    tally = Tally()
    channel = ControlChannel(controller.address, name="doubter", tally=tally)
    channel.start()
    try:
        controller.welcome()
        assert channel.wait_fresh(PATIENCE_S) is not None
        controller.answer_heartbeats = False
        tally.found([key("kept")])
        with pytest.raises(DeadlineExceeded):
            channel.lookup([key("a")], deadline=time.monotonic() + 0.3)
        assert channel.in_doubt
        controller.expect(Lookup)
        heartbeat = controller.expect(Heartbeat)
        controller.send(HeartbeatAnswer(heartbeat.term, heartbeat.session, heartbeat.number, 0))
        controller.answer_heartbeats = True
        assert uses_of(controller.expect(Used)) == {named(key("kept")): 1}
    finally:
        channel.close()
        controller.close()
