"""Asking the controller for its figures: over a real connection, and when it does not play along."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest
from cluster import wait_until
from scripted_controller import PATIENCE_S, Stage, soon
from test_channel_with_controller import Controller

from mmcache.control.channel import ControlChannel
from mmcache.control.messages import (
    MAX_FIGURES,
    Figures,
    Inspect,
    MalformedMessage,
    Refused,
    decode_from_controller,
    encode,
)
from mmcache.errors import ControllerUnavailable, DeadlineExceeded


@pytest.fixture
def channel() -> Iterator[ControlChannel]:
    controller = Controller()
    opened = ControlChannel(controller.address, name="inspector")
    opened.start()
    assert opened.wait_fresh(PATIENCE_S) is not None
    yield opened
    opened.close()
    controller.stop()


def test_the_figures_of_a_real_controller_come_back(channel: ControlChannel) -> None:
    figures = channel.inspect(deadline=soon())
    assert (figures["sessions"], figures["entries"], figures["session.begun"]) == (1, 0, 1)


def test_without_a_session_there_are_no_figures_but_a_reason() -> None:
    channel = ControlChannel("tcp://127.0.0.1:9", name="inspector")
    channel.start()
    try:
        with pytest.raises(ControllerUnavailable, match=r"no fresh session with tcp://127\.0\.0\.1:9"):
            channel.inspect(deadline=soon())
    finally:
        channel.close()


def test_a_controller_that_does_not_know_the_question_ends_the_wait(staged: Stage) -> None:
    asked = staged.call(staged.channel.inspect, deadline=soon())
    request = staged.controller.expect(Inspect).request
    staged.controller.send(Refused(request, "what is that?"))
    with pytest.raises(ControllerUnavailable, match="what is that"):
        asked.result(PATIENCE_S)


def test_no_answer_ends_with_the_deadline_and_a_late_one_is_ignored(staged: Stage) -> None:
    asked = staged.call(staged.channel.inspect, deadline=time.monotonic() + 0.1)
    request = staged.controller.expect(Inspect).request
    with pytest.raises(DeadlineExceeded):
        asked.result(PATIENCE_S)
    staged.controller.answer(Figures, request, {"sessions": 1})
    wait_until(lambda: "control.unasked" in staged.counters.snapshot(), timeout=PATIENCE_S, what="the late answer")
    again = staged.call(staged.channel.inspect, deadline=soon())
    staged.controller.answer(Figures, staged.controller.expect(Inspect).request, {"sessions": 2})
    assert again.result(PATIENCE_S) == {"sessions": 2}


@pytest.mark.parametrize(
    "figures",
    [{f"name-{number}": 1 for number in range(MAX_FIGURES + 1)}, {"": 1}, {"x" * 129: 1}, {"a": -1}, {"a": 1 << 63}],
)
def test_figures_out_of_bounds_are_no_message(figures: dict[str, int]) -> None:
    with pytest.raises(MalformedMessage):
        decode_from_controller(msgspec.msgpack.encode([74, 1, 1, 1, figures]))


def test_both_messages_survive_the_wire() -> None:
    answer = Figures(1, 2, 3, {"sessions": 0, "entries": (1 << 63) - 1})
    assert decode_from_controller(encode(answer)) == answer
