"""An acquisition by itself: what its caller sees once it has left is nothing, so that nothing is owned twice."""

from __future__ import annotations

import time

import pytest

from mmcache.control.calls import Acquisition, Call
from mmcache.control.messages import Granted, Waiting
from mmcache.errors import ControllerUnavailable, DeadlineExceeded


def waiting_acquisition() -> Acquisition:
    acquisition = Acquisition(2, wait_s=60.0, renew_for_s=1.0, check=lambda: None, leave=lambda _: None)
    acquisition.deliver([0, 1], [Waiting(), Waiting()])
    acquisition.answers = acquisition.wait(0.0)
    return acquisition


def test_what_came_before_the_caller_left_and_was_not_collected_is_the_channels_to_give_back() -> None:
    acquisition = waiting_acquisition()
    acquisition.resolve([(0, Granted(0, 5, 1000))])
    acquisition.leave()
    assert acquisition.resolutions(time.monotonic() + 60.0) == [], "the caller got a claim that is about to be aborted"
    assert acquisition.take_uncollected() == [5]
    assert acquisition.take_uncollected() == []


def test_what_has_come_is_returned_though_the_deadline_has_passed() -> None:
    acquisition = waiting_acquisition()
    acquisition.resolve([(0, Granted(0, 5, 1000))])
    assert acquisition.resolutions(0.0) == [(0, Granted(0, 5, 1000))]
    acquisition.leave()
    assert acquisition.take_uncollected() == []


def test_a_call_that_has_all_its_results_succeeds_at_its_deadline_and_after_a_failure() -> None:
    call: Call[int] = Call(2)
    call.deliver([1], [11])
    with pytest.raises(DeadlineExceeded):
        call.wait(0.0)
    call.deliver([0], [10])
    call.fail("too late")
    assert call.wait(0.0) == [10, 11]


def test_a_call_that_fails_says_why_first() -> None:
    call: Call[int] = Call(1)
    call.fail("first")
    call.fail("second")
    with pytest.raises(ControllerUnavailable, match="first"):
        call.wait(time.monotonic() + 60.0)
