"""What a check finds: in order, worth knowing, or in the way; and what to do."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec


class Status(str, enum.Enum):
    """How a check ended. Only FAILING is in the way of serving."""

    OK = "ok"
    WARNING = "warning"
    FAILING = "failing"


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor's report; `advice` says what to do, and is empty when there is nothing."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def ok(name: str, detail: str) -> Finding:
    """All is well."""
    return Finding(name, Status.OK, detail)


def warning(name: str, detail: str, advice: str) -> Finding:
    """It serves, but this costs something, or will fail under load."""
    return Finding(name, Status.WARNING, detail, advice)


def failing(name: str, detail: str, advice: str) -> Finding:
    """It cannot serve like this."""
    return Finding(name, Status.FAILING, detail, advice)


class Check(NamedTuple):
    """One thing to look at, and how long that may take in seconds."""

    name: str
    look: Callable[[], Finding]
    patience_s: float = 10.0


def examine(check: Check) -> Finding:
    """What a check finds; that it did not end in time, or failed itself, is a finding too. Never raises.

    It runs on a daemon thread, so that neither a name server nor a device that hangs can hold us longer.
    """
    found: list[Finding] = []

    def look() -> None:
        try:
            found.append(check.look())
        except Exception as error:  # noqa: BLE001 - a report with a hole in it is better than none
            detail = f"could not be looked at: {type(error).__name__}: {error}"
            found.append(warning(check.name, detail, "This is a fault of the doctor's own: please report it."))

    thread = threading.Thread(target=look, name=f"doctor {check.name}", daemon=True)
    thread.start()
    thread.join(check.patience_s)
    if found:
        return found[0]
    return failing(check.name, f"did not answer within {check.patience_s:g} s", "See what hangs there, and try again.")
