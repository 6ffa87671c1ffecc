"""What Mooncake's return codes mean, and whether a call that ended so has let go of the caller's memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from mmcache.store.base import Outcome

_logger = logging.getLogger(__name__)

SLOW_S: Final = 1.0
"""A failed transfer that took longer than this may be one that was given up while bytes were still under way."""

_OUTCOMES: Final[Mapping[int, Outcome]] = {
    -1: Outcome.FAILED,
    -101: Outcome.NO_SPACE,  # nobody lends any memory
    -200: Outcome.NO_SPACE,
    -600: Outcome.INVALID,
    -601: Outcome.INVALID,
    -703: Outcome.IN_PROGRESS,
    -704: Outcome.NOT_FOUND,
    -705: Outcome.OK,  # "exists", from a put: what is published is confirmed anyway
    -706: Outcome.LEASED,
    -707: Outcome.LEASE_EXPIRED,
    -712: Outcome.NOT_FOUND,  # the replica is gone
    -714: Outcome.LEASED,  # somebody is using it
    -800: Outcome.TRANSFER_FAILED,
    -801: Outcome.CHECKSUM,
    -900: Outcome.UNAVAILABLE,  # the call to the master or the sidecar failed
    -901: Outcome.UNAVAILABLE,  # or timed out
    -1700: Outcome.QUOTA,
    -1701: Outcome.QUOTA,
}

UNAVAILABLE_CODES: Final = frozenset(code for code, outcome in _OUTCOMES.items() if outcome is Outcome.UNAVAILABLE)

_NO_BYTES_UNDER_WAY: Final = frozenset(
    {
        Outcome.OK,
        Outcome.NOT_FOUND,
        Outcome.TOO_SMALL,
        Outcome.IN_PROGRESS,
        Outcome.NO_SPACE,
        Outcome.QUOTA,
        Outcome.INVALID,
    }
)
"""Decided before the first byte moves, or after the last."""

_unknown_codes: set[int] = set()


def outcome_of(code: int) -> Outcome:
    """What a return code says; a size or a count is OK, and a code that nobody knows is FAILED, logged once."""
    if code >= 0:
        return Outcome.OK
    outcome = _OUTCOMES.get(code)
    if outcome is not None:
        return outcome
    if code not in _unknown_codes and len(_unknown_codes) < 256:
        _unknown_codes.add(code)
        _logger.warning("Mooncake returned the unknown code %d; taken for a failure", code)
    return Outcome.FAILED


def has_settled(outcome: Outcome, elapsed_s: float, *, sidecar: bool) -> bool:
    """Whether no transfer can touch the memory of a call that ended like this after `elapsed_s` seconds.

    With a sidecar, UNAVAILABLE means that our call to it ended and says nothing of the transfer that it runs for us:
    one such was seen to overwrite a reused block half a minute later. An embedded client moves the bytes itself, and
    asks the master, in vain or not, before and after.
    """
    if outcome in _NO_BYTES_UNDER_WAY:
        return True
    if outcome is Outcome.UNAVAILABLE:
        return not sidecar
    return elapsed_s <= SLOW_S
