"""The table of items: whatever happens in whatever order, each item has one last word, and nothing follows it."""

from __future__ import annotations

import re
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from mmcache import EmbeddingKey
from mmcache.agent.messages import AgentMessage, Item, Missing, Ready
from mmcache.agent.table import Claim, State, Table, Wait
from mmcache.client.names import NamedKey

KEY = EmbeddingKey("m", "v", "h")
CLAIM = Claim(NamedKey.of(KEY, "a", 0), 5)
STEPS = ["add", "end", "fail", "fill", "wait", "nowait", "grant", "publish", "drop"]
WORDS = {"Waiting": "w", "Granted": "g", "Missing": "m", "Published": "p", "Ready": "r"}


def item(number: int) -> Item:
    return Item(number, KEY, 0, 4096, 1, [1], "float32", True, 1.0)


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2))))
def test_the_engine_is_told_of_each_item_in_order(steps: list[tuple[str, int]]) -> None:
    said: list[AgentMessage] = []
    table = Table(said.append)
    lives = {}
    waits = [Wait(Mock()) for _ in range(2)]
    last = 0
    for step, which in steps:
        wanted = lives.get(which)
        if step == "add":
            last += 1
            lives[which] = table.add(item(last), 0.0)
        elif wanted is None:
            continue
        elif step == "end":
            table.end(wanted, Ready(wanted.item.number, 0, [1], 4, "store"))
        elif step == "fail":
            busy = wanted.state is not State.ASKED and table.lives(wanted)
            table.fail(wanted)
            assert table.lives(wanted) == busy
        elif step == "fill" and wanted.state is State.ASKED:
            table.begin_filling(wanted)
        elif step == "wait" and wanted.state is State.ASKED and wanted.wait is None:
            table.wait(wanted, waits[which % 2])
        elif step == "nowait":
            table.wait_no_more(wanted)
        elif step == "grant" and wanted.state is State.ASKED:
            table.grant(wanted, CLAIM)
        elif step == "publish":
            assert (table.begin_publishing(wanted.item.number) is wanted) <= (wanted.state is State.PUBLISHING)
        elif step == "drop":
            writes = wanted.state in (State.FILLING, State.PUBLISHING) and table.lives(wanted)
            before = len(said)
            claim, _ = table.drop(wanted.item.number)
            assert claim in (None, CLAIM)
            assert not (writes and len(said) > before), "its block is in use still"
    for number in range(1, last + 1):
        told = "".join(WORDS[type(message).__name__] for message in said if message.number == number)
        assert re.fullmatch("w?g?[mpr]?", told), told
    waiting = [wait for wait in waits if wait.left]
    assert sum(wait.left for wait in waiting) == sum(wanted.wait is not None for wanted in table._wanted.values())


def test_the_last_of_an_acquisitions_waits_to_be_dropped_ends_it() -> None:
    table = Table(lambda message: None)
    wait = Wait(Mock())
    wanted = [table.add(item(number), 0.0) for number in (1, 2)]
    for one in wanted:
        assert one is not None
        assert table.wait(one, wait)
    assert table.drop(1).acquisition is None
    assert table.drop(2).acquisition is wait.acquisition
    assert table.drop(2) == (None, None)


def test_a_failure_is_no_last_word_of_an_item_whose_block_is_written_to() -> None:
    said: list[AgentMessage] = []
    table = Table(said.append)
    wanted = table.add(item(1), 0.0)
    assert wanted is not None
    assert table.begin_filling(wanted)
    table.fail(wanted)
    assert said == []
    assert table.end(wanted, Missing(1, "failed"))
    assert said == [Missing(1, "failed")]
