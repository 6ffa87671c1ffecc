"""Names whose leases are to be renewed again and again, and which of them is due. A state machine, without I/O."""

from __future__ import annotations

from collections.abc import Iterable


class Renewals:
    """Names, each due at once, and then every so often.

    Args:
        every_s: seconds from when a name was taken until it is due again.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        # Both in the order in which they are due.
        self._new: dict[bytes, None] = {}
        self._taken: dict[bytes, float] = {}
        """When each is due again."""

    def __len__(self) -> int:
        return len(self._new) + len(self._taken)

    def add(self, name: bytes) -> None:
        """It is due now."""
        self._taken.pop(name, None)
        self._new[name] = None

    def discard(self, name: bytes) -> None:
        """It is to be renewed no more."""
        self._new.pop(name, None)
        self._taken.pop(name, None)

    def failed(self, names: Iterable[bytes]) -> None:
        """What became of these is not known: those that are there still are due now."""
        for name in names:
            if name in self._taken:
                self.add(name)

    def take(self, now: float, most: int) -> list[bytes]:
        """Up to `most` that are due, those first that are due for longest. `now` does not go back."""
        taken: list[bytes] = []
        for name, due in self._taken.items():
            if due > now or len(taken) >= most:
                break
            taken.append(name)
        for name in self._new:
            if len(taken) >= most:
                break
            taken.append(name)
        for name in taken:
            self.discard(name)
            self._taken[name] = now + self._every_s
        return taken
