"""Drops, races, faults of our own and overload: each item still has one last word, and no claim is kept."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from cluster import wait_until
from engines import ServedEngine, embedding_of, last_word
from serving import key_of

from mmcache.agent import service as service_module
from mmcache.agent.messages import Granted, Missing, Ready, Waiting
from mmcache.agent.table import MAX_ITEMS


def test_an_item_dropped_while_it_is_read_is_never_written_to(
    engines: list[ServedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = engines
    assert one.ask_and_encode("read", embedding_of(1)).status == "stored"
    reading, go_on = threading.Event(), threading.Event()
    read = other.service._reader.read

    def slow(*arguments: Any, **named: Any) -> Any:
        batch = read(*arguments, **named)
        reading.set()
        assert go_on.wait(60)
        return batch

    monkeypatch.setattr(other.service._reader, "read", slow)
    dropped, kept = other.item(key_of("read")), other.item(key_of("other"), claim=False)
    other.ask_for([dropped, kept])
    assert reading.wait(60)
    other.drop(dropped)
    assert other.missing(dropped) == "dropped"
    go_on.set()
    assert other.missing(kept) == "absent", "so the thread is past the other one"
    assert not any(other.staging.block(dropped.offset, dropped.nbytes)), "its block was the engine's again"
    assert not other.said[dropped.number]


def test_an_item_dropped_while_it_is_written_to_ends_only_then(
    engines: list[ServedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = engines
    assert one.ask_and_encode("written", embedding_of(1)).status == "stored"
    writing, go_on = threading.Event(), threading.Event()
    copy = service_module.copy_into

    def slow(*arguments: Any) -> None:
        writing.set()
        assert go_on.wait(60)
        copy(*arguments)

    monkeypatch.setattr(service_module, "copy_into", slow)
    item = one.ask("written")
    assert writing.wait(60)
    one.drop(item)
    assert not one.receive(0.0), "the block is still written to"
    go_on.set()
    one.expect(item, Ready)


def test_what_changed_while_it_was_read_is_stale(engines: list[ServedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = engines
    assert one.ask_and_encode("stale", embedding_of(1)).status == "stored"
    copy = service_module.copy_into

    def change(*arguments: Any) -> None:
        copy(*arguments)
        one.freshness._world = ("another", 0)

    monkeypatch.setattr(service_module, "copy_into", change)
    before = one.staging.epoch
    assert one.missing(one.ask("stale")) == "stale"
    assert one.staging.epoch == before + 1


@pytest.mark.parametrize("place", ["wanted", "read", "copy", "acquire"])
def test_a_fault_of_ours_is_a_miss_counted_and_logged(
    engines: list[ServedEngine], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = engines
    assert other.ask_and_encode(f"fault-{place}", embedding_of(1)).status == "stored"

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    target = {
        "wanted": (one.service._reader, "wanted"),
        "read": (one.service._reader, "read"),
        "copy": (service_module, "copy_into"),
        "acquire": (one.service._channel, "acquire"),
    }[place]
    before = one.count("agent.internal_error.ZeroDivisionError")
    with monkeypatch.context() as patch:
        patch.setattr(*target, fail)
        name = f"fault-{place}" if place != "acquire" else "absent-fault"
        assert one.missing(one.ask(name)) == "failed"
    assert one.count("agent.internal_error.ZeroDivisionError") == before + 1
    one.expect(one.ask(f"fault-{place}"), Ready)


def test_a_fault_after_the_grants_gives_them_back(engines: list[ServedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = engines

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(one.service._table, "grant", fail)
        assert one.missing(one.ask("given back")) == "failed"
    other.expect(other.ask("given back"), Granted)


def test_a_fault_in_publishing_drops_the_entry_and_passes_the_claim_on(
    engines: list[ServedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = engines

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    item = one.ask("unlucky")
    one.expect(item, Granted)
    waiting = other.ask("unlucky")
    other.expect(waiting, Waiting)
    with monkeypatch.context() as patch:
        patch.setattr(one.service._publications._publisher, "publish", fail)
        published = one.encode(item, embedding_of(1))
    assert (published.status, published.reason) == ("dropped", "failed")
    other.expect(waiting, Granted)


def test_more_than_can_be_served_is_missing_at_once(
    engines: list[ServedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = engines
    go_on = threading.Event()
    look = one.freshness.look

    looking: list[int] = []

    def slow() -> int | None:
        looking.append(threading.get_ident())
        assert go_on.wait(60)
        return look()

    monkeypatch.setattr(one.freshness, "look", slow)
    waiting = one.service._readers._reads
    asked = [one.ask(f"read-{number}", wait_s=0.0) for number in range(service_module.READERS)]
    wait_until(lambda: len(looking) == len(asked), timeout=30, what="that all readers are at work")
    asked += [one.ask(f"load-{number}", wait_s=0.0) for number in range(service_module.MAX_ASKS)]
    wait_until(lambda: len(waiting) == service_module.MAX_ASKS, timeout=30, what="that all others wait")
    assert one.missing(one.ask("beyond")) == "overloaded"
    go_on.set()
    for item in asked:
        assert isinstance(one.next(item), Granted)
    one.drop(*asked[:64])


def test_no_more_waits_than_there_are_threads_for(engines: list[ServedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = engines
    for name in ("queue-0", "queue-1"):
        one.expect(one.ask(name), Granted)
    monkeypatch.setattr(other.service, "_may_wait", threading.BoundedSemaphore(1))
    first = other.ask("queue-0")
    other.expect(first, Waiting)
    second = other.ask("queue-1")
    other.expect(second, Waiting)
    assert other.missing(second) == "overloaded"
    other.drop(first)
    assert other.missing(first) == "dropped"


def test_the_table_is_bounded(engines: list[ServedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = engines
    monkeypatch.setattr("mmcache.agent.table.MAX_ITEMS", 1)
    assert MAX_ITEMS > 1
    first = one.ask("bounded-0")
    one.expect(first, Granted)
    assert one.missing(one.ask("bounded-1")) == "overloaded"
    one.drop(first)
    assert one.missing(first) == "dropped"
    one.expect(one.ask("bounded-1"), Granted)


def test_every_item_has_one_last_word_whatever_is_dropped_when(engines: list[ServedEngine]) -> None:
    one, other = engines
    for number in range(0, 40, 2):
        assert one.ask_and_encode(f"race-{number}", embedding_of(number)).status == "stored"
    asked = []
    for number in range(40):
        item = other.ask(f"race-{number}")
        asked.append(item)
        time.sleep(0.0003 * (number % 7))
        other.drop(item)
    last = {item.number: last_word(other, item) for item in asked}
    assert not [number for number, said in other.said.items() if said], "nothing follows a last word"
    assert set(map(type, last.values())) <= {Ready, Missing}
    assert not other.service.figures()["agent.items"]
    for item in (one.ask(f"race-{number}") for number in range(1, 40, 2)):
        one.expect(item, Granted)  # no claim was kept
