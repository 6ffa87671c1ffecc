"""What the agent's service makes of each item, against a real store and a real controller."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch
from cluster import wait_until
from engines import SHAPE, STAGING_BYTES, ServedEngine, embedding_of, last_word, waits
from serving import Serving, key_of, name_of, plant, store_of

from mmcache import Selector
from mmcache.agent.messages import Ask, Encoded, Granted, Missing, Published, Ready, Waiting
from mmcache.store.base import Outcome


def test_what_nobody_has_is_granted_encoded_published_and_then_ready_for_others(engines: list[ServedEngine]) -> None:
    one, other = engines
    item = one.ask("published")
    one.expect(item, Granted)
    assert one.encode(item, embedding_of(7)) == Published(item.number, "stored", "")
    again = other.ask("published")
    ready = other.expect(again, Ready)
    assert (ready.shape, ready.nbytes, ready.source) == (list(SHAPE), 64 * 128 * 4, "store")
    assert torch.equal(other.embedding(again, ready), embedding_of(7))
    local = other.ask("published", widths=[])
    assert other.expect(local, Ready).source == "local"
    assert not one.service.figures()["agent.items"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
def test_bytes_come_as_they_were_whatever_their_dtype(engines: list[ServedEngine], dtype: torch.dtype) -> None:
    one, other = engines
    tensor = torch.randint(0, 255, (33, 48), dtype=torch.uint8).view(dtype)
    assert one.ask_and_encode(f"typed-{dtype}", tensor).status == "stored"
    name = str(dtype).removeprefix("torch.")
    item = other.ask(f"typed-{dtype}", rows=33, widths=[7, tensor.shape[1]], dtype=name)
    got = other.embedding(item, other.expect(item, Ready))
    assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), "bit for bit, NaN too"


def test_of_two_that_ask_one_encodes_and_the_other_waits_for_its_result(engines: list[ServedEngine]) -> None:
    one, other = engines
    item = one.ask("both")
    one.expect(item, Granted)
    waiting = other.ask("both", claim=False)
    other.expect(waiting, Waiting)
    assert one.encode(item, embedding_of(1)).status == "stored"
    ready = other.expect(waiting, Ready)
    assert torch.equal(other.embedding(waiting, ready), embedding_of(1))


def test_what_engines_read_and_what_they_encode_reaches_the_controllers_accounts(fresh_serving: Serving) -> None:
    with ServedEngine(fresh_serving) as one, ServedEngine(fresh_serving) as other:
        assert one.ask_and_encode("told", embedding_of(1)).status == "stored"
        for _ in range(2):
            item = other.ask("told")
            other.expect(item, Ready)
        assert other.missing(other.ask("nobody has it", claim=False)) == "absent"

        def told() -> tuple[int, int]:
            figures = one.cache._channel.inspect(deadline=time.monotonic() + 60)
            return figures["hits"], figures["missed"]

        wait_until(
            lambda: told() == (2, 2), timeout=60, what="two hits, and a miss that was encoded and one that was not"
        )


def test_a_claim_that_is_dropped_passes_to_whowaits(engines: list[ServedEngine]) -> None:
    one, other = engines
    item = one.ask("passed on")
    one.expect(item, Granted)
    waiting = other.ask("passed on")
    other.expect(waiting, Waiting)
    one.drop(item)
    assert one.missing(item) == "dropped"
    other.expect(waiting, Granted)
    assert other.encode(waiting, embedding_of(2)).status == "stored"


def test_who_cannot_encode_is_never_granted_and_passes_the_claim_on(engines: list[ServedEngine]) -> None:
    one, other = engines
    assert one.missing(one.ask("not for me", claim=False)) == "absent"
    item = other.ask("not for me")
    other.expect(item, Granted)
    waiting = one.ask("not for me", claim=False)
    one.expect(waiting, Waiting)
    other.drop(item)
    assert one.missing(waiting) == "absent"
    assert other.missing(item) == "dropped"
    other.expect(other.ask("not for me"), Granted)


def test_a_wait_that_is_over_is_missing_and_the_others_of_its_batch_wait_on(engines: list[ServedEngine]) -> None:
    one, other = engines
    items = [one.ask("short"), one.ask("long")]
    for item in items:
        one.expect(item, Granted)
    short, long = other.item(key_of("short"), wait_s=0.05), other.item(key_of("long"))
    other.ask_for([short, long])
    assert last_word(other, short) == Missing(short.number, "wait_failed")
    other.expect(long, Waiting)
    assert one.encode(items[1], embedding_of(3)).status == "stored"
    other.expect(long, Ready)
    assert other.missing(other.ask("short", wait_s=0.0)) == "wait_failed", "and does not wait at all"


def test_a_wait_that_is_dropped_leaves_the_others_of_its_batch_waiting(engines: list[ServedEngine]) -> None:
    one, other = engines
    items = [one.ask("left"), one.ask("stays")]
    for item in items:
        one.expect(item, Granted)
    left, stays = other.item(key_of("left")), other.item(key_of("stays"))
    other.ask_for([left, stays])
    other.expect(left, Waiting)
    other.expect(stays, Waiting)
    other.drop(left)
    assert other.missing(left) == "dropped"
    one.drop(*items)
    other.expect(stays, Granted)
    other.drop(stays)
    assert other.missing(stays) == "dropped"
    one.expect(one.ask("left"), Granted)
    assert left.number not in {number for number, said in other.said.items() if said}, "nothing after its last word"


def test_dropping_the_last_wait_of_a_batch_ends_its_thread(engines: list[ServedEngine]) -> None:
    one, other = engines
    one.expect(one.ask("awaited in vain"), Granted)
    waiting = other.ask("awaited in vain")
    other.expect(waiting, Waiting)
    wait_until(lambda: waits(other) == 1, timeout=30, what="a thread that waits")
    other.drop(waiting)
    wait_until(lambda: waits(other) == 0, timeout=30, what="the end of the wait")


def test_a_drop_of_what_is_unknown_or_ended_is_ignored(engines: list[ServedEngine]) -> None:
    one, _ = engines
    before = one.count("agent.unasked")
    item = one.ask("dropped twice")
    one.expect(item, Granted)
    one.drop(item, item)
    assert one.missing(item) == "dropped"
    one.drop(item, one.item(key_of("never asked for")))
    assert one.send(Encoded(item.number, list(SHAPE), "float32", 0.0))
    one.expect(one.ask("another"), Granted)
    assert not one.said[item.number], "nothing after its last word"
    assert one.count("agent.unasked") == before + 1


@pytest.mark.parametrize(
    "asked",
    [{"rows": 63}, {"widths": [127]}, {"widths": [64, 256]}, {"dtype": "int32"}, {"nbytes": 64 * 128 * 4 - 1}],
    ids=str,
)
def test_an_entry_that_is_not_as_the_item_must_be_is_unexpected_and_not_claimed(
    engines: list[ServedEngine], asked: dict[str, Any]
) -> None:
    one, other = engines
    name = f"unexpected-{asked}"
    assert one.ask_and_encode(name, embedding_of(4)).status == "stored"
    before = other.count("agent.missing.unexpected")
    assert other.missing(other.ask(name, **asked)) == "unexpected"
    assert other.count("agent.missing.unexpected") == before + 1


def test_an_entry_of_several_tensors_or_dimensions_is_unexpected(serving: Serving) -> None:
    with ServedEngine(serving) as engine:
        assert engine.cache.put(key_of("two"), {"a": torch.ones(SHAPE), "b": torch.ones(1)}).status == "stored"
        assert engine.cache.put(key_of("deep"), torch.ones(SHAPE[0], SHAPE[1], 1)).status == "stored"
        for name in ("two", "deep"):
            assert engine.missing(engine.ask(name, widths=[])) == "unexpected"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((63, 128), "float32"), ((64, 127), "float32"), ((64, 128), "bfloat16"), ((64, 128, 1), "float32"), ((1,), "no")],
)
def test_what_was_encoded_as_something_else_is_not_published_and_its_claim_passes_on(
    engines: list[ServedEngine], shape: tuple[int, ...], dtype: str
) -> None:
    one, other = engines
    name = f"invalid-{shape}-{dtype}"
    item = one.ask(name)
    one.expect(item, Granted)
    waiting = other.ask(name)
    other.expect(waiting, Waiting)
    assert one.send(Encoded(item.number, list(shape), dtype, 0.0))
    assert one.expect(item, Published) == Published(item.number, "dropped", "invalid")
    other.expect(waiting, Granted)
    other.drop(waiting)


def test_what_is_larger_than_the_pool_is_not_claimed(serving: Serving) -> None:
    shape = (1024, 512)
    with ServedEngine(serving, pool_bytes="1MiB") as small, ServedEngine(serving) as other:
        item = small.ask("too large", rows=shape[0], widths=[shape[1]], offset=0, nbytes=2 << 20)
        assert small.missing(item) == "larger_than_pool", "so it is not claimed"
        other.expect(other.ask("too large", rows=shape[0], widths=[shape[1] // 4]), Granted)


@pytest.mark.parametrize(
    "fields",
    [{"offset": STAGING_BYTES - 4}, {"nbytes": STAGING_BYTES + 1}, {"dtype": "float"}],
    ids=str,
)
def test_an_item_that_cannot_be_is_invalid(engines: list[ServedEngine], fields: dict[str, Any]) -> None:
    one, _ = engines
    assert one.missing(one.ask("impossible", **fields)) == "invalid"


def test_items_of_one_key_in_one_message_are_each_served(engines: list[ServedEngine]) -> None:
    one, _ = engines
    items = [one.item(key_of("thrice")) for _ in range(3)]
    one.ask_for(items)
    first = {type(one.next(item)): item for item in items}
    assert set(first) == {Granted, Waiting}, "one of them encodes"
    assert one.encode(first[Granted], embedding_of(5)).status == "stored"
    for item in items:
        if item is not first[Granted]:
            assert torch.equal(one.embedding(item, one.expect(item, Ready)), embedding_of(5))


def test_a_number_under_way_is_not_taken_twice(engines: list[ServedEngine]) -> None:
    one, _ = engines
    item = one.ask("taken")
    one.expect(item, Granted)
    before = one.count("agent.refused")
    one.ask_for([item])
    assert one.count("agent.refused") == before + 1
    one.drop(item)
    assert one.missing(item) == "dropped"


def test_many_items_at_once_are_all_served(engines: list[ServedEngine]) -> None:
    one, other = engines
    items = {number: one.item(key_of(f"many-{number}")) for number in range(60)}
    for start in range(0, 60, 20):
        one.ask_for([items[number] for number in range(start, start + 20)])
    for number, item in items.items():
        one.expect(item, Granted)
        one.encoded(item, embedding_of(number))
    for item in items.values():
        assert one.expect(item, Published).status == "stored"
    asked = {number: other.item(key_of(f"many-{number}"), claim=False) for number in range(60)}
    other.ask_for(list(asked.values()))
    for number, item in asked.items():
        assert torch.equal(other.embedding(item, other.expect(item, Ready)), embedding_of(number))


def test_a_batch_larger_than_the_pool_is_read_in_parts(serving: Serving) -> None:
    shape = (128, 512)  # 256 KiB each, 8 MiB of them
    with ServedEngine(serving) as writer, ServedEngine(serving, pool_bytes="2MiB") as reader:
        entries = [(key_of(f"part-{number}"), torch.full(shape, float(number))) for number in range(32)]
        assert {result.status for result in writer.cache.put_many(entries)} == {"stored"}
        items = [reader.item(key, rows=shape[0], widths=[shape[1]]) for key, _ in entries]
        reader.ask_for(items)
        for item, (_, tensor) in zip(items, entries, strict=True):
            assert torch.equal(reader.embedding(item, reader.expect(item, Ready)), tensor)


def test_what_is_staged_counts_no_more_once_an_invalidation_is_complete(engines: list[ServedEngine]) -> None:
    one, other = engines
    key = key_of("invalidated")
    assert one.ask_and_encode("invalidated", embedding_of(1)).status == "stored"
    ready = one.expect(one.ask("invalidated"), Ready)
    granted = one.ask("granted before")
    one.expect(granted, Granted)
    assert one.staging.is_fresh(ready.epoch)
    assert other.cache.invalidate(Selector.exactly(key), wait=True).complete
    assert not one.staging.is_fresh(ready.epoch)
    assert other.cache.invalidate(Selector.exactly(key_of("granted before")), wait=True).complete
    published = one.encode(granted, embedding_of(2))
    assert (published.status, published.reason) == ("dropped", "invalidated")
    item = one.ask("invalidated")
    one.expect(item, Granted)
    assert one.encode(item, embedding_of(3)).status == "stored"


def test_what_the_directory_promises_and_the_store_lost_is_granted_anew() -> None:
    with Serving(lease_ms=200) as serving, ServedEngine(serving, local_entries=False) as one:
        assert one.ask_and_encode("lost", embedding_of(6)).status == "stored"
        wait_until(
            lambda: store_of(one.cache).remove([name_of(one.cache, key_of("lost"))], deadline=1e12) == [Outcome.OK],
            timeout=10,
            what="the removal, once nobody leases it",
        )
        item = one.ask("lost")
        one.expect(item, Granted)
        assert one.count("undelivered") == 1
        assert one.encode(item, embedding_of(6)).status == "stored"


def test_what_is_corrupt_is_granted_under_another_name_at_once(engines: list[ServedEngine]) -> None:
    one, other = engines
    plant(one.cache, key_of("corrupt"), b"not one of ours" * 500)
    item = one.ask("corrupt")
    one.expect(item, Granted)
    assert one.encode(item, embedding_of(6)).status == "stored"
    number = one.cache.mark().number
    wait_until(lambda: other.cache.mark().number >= number, timeout=60, what="the push")
    again = other.ask("corrupt")
    assert torch.equal(other.embedding(again, other.expect(again, Ready)), embedding_of(6))
    assert not one.count("unclaimed")


def test_without_a_controller_items_are_not_fresh_and_with_it_they_are_served_again(fresh_serving: Serving) -> None:
    with ServedEngine(fresh_serving) as one, ServedEngine(fresh_serving) as other:
        assert one.ask_and_encode("before", embedding_of(1)).status == "stored"
        item = one.ask("under way")
        one.expect(item, Granted)
        waiting = other.ask("under way")
        other.expect(waiting, Waiting)
        ready = one.expect(one.ask("before"), Ready)
        fresh_serving.controller.kill()
        assert other.missing(waiting) == "wait_failed", "its session is lost"
        published = one.encode(item, embedding_of(2))
        assert (published.status, published.reason) == ("dropped", "uncommitted")
        wait_until(lambda: one.freshness.look() is None, timeout=30, what="the end of the session")
        assert not one.staging.is_fresh(ready.epoch)
        assert one.missing(one.ask("before")) == "not_fresh"
        fresh_serving.controller.start()
        wait_until(lambda: one.freshness.look() is not None, timeout=30, what="a new session")
        assert not one.staging.is_fresh(ready.epoch), "of another lineage"
        item = one.ask("before")
        one.expect(item, Granted)
        assert one.encode(item, embedding_of(3)).status == "stored"
        again = one.ask("before")
        assert torch.equal(one.embedding(again, one.expect(again, Ready)), embedding_of(3))


def test_a_store_that_is_down_costs_no_claim_and_no_waiting(fresh_serving: Serving) -> None:
    with ServedEngine(fresh_serving, read_timeout=1.0, local_entries=False) as one:
        assert one.ask_and_encode("kept", embedding_of(1)).status == "stored"
        not_read = {"deadline", "unavailable", "not_fresh"}  # the last on a machine that is too busy for heartbeats
        fresh_serving.sidecar.send(signal.SIGSTOP)
        try:
            started = time.monotonic()
            assert one.missing(one.ask("kept")) in not_read
            assert time.monotonic() - started < 1.0 + 10.0
            wait_until(lambda: one.count("store.open") == 1, timeout=30, what="the breaker's opening")
            wait_until(lambda: one.missing(one.ask("kept")) == "unavailable", timeout=30, what="a miss at once")
        finally:
            fresh_serving.sidecar.send(signal.SIGCONT)
        wait_until(lambda: not one.count("store.open"), timeout=60, what="the breaker's closing")
        while isinstance(word := one.next(again := one.ask("kept")), Missing):
            assert word.reason in not_read
        assert isinstance(word, Ready)
        assert torch.equal(one.embedding(again, word), embedding_of(1))


def test_an_ask_of_nothing_is_nothing(engines: list[ServedEngine]) -> None:
    one, _ = engines
    assert one.send(Ask([]))
    one.expect(one.ask("something"), Granted)
