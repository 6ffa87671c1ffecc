"""What the cache holds and what it saves: in all, and for each tenant and model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from mmcache.controller.directory import Entry
from mmcache.key import DIGEST_BYTES, Scope

MOST_ROWS: Final = 1_000
"""Most tenants, and most models, that have an account of their own, which they keep for as long as the term lasts."""
OTHER: Final = "(other)"
"""The account of all that came later."""
MOST_COST_MS: Final = 3_600_000.0
"""A publisher that says to have computed for longer does not tell the truth."""
_MOST_FIGURE: Final = (1 << 63) - 1


def credible_ms(cost_ms: float) -> float:
    """What a publisher says that an entry cost, as far as it can be: 0 if it is negative, NaN or above an hour."""
    return cost_ms if 0.0 < cost_ms <= MOST_COST_MS else 0.0


class Account(msgspec.Struct, gc=False):
    """One account. `entries` and `nbytes` are in the directory now, all else is since the start.

    `saved_ms` is what the entries that were hit had cost, each time, and `published_ms` what those published did.
    """

    entries: int = 0
    nbytes: int = 0
    hits: int = 0
    hit_bytes: int = 0
    saved_ms: float = 0.0
    published: int = 0
    published_bytes: int = 0
    published_ms: float = 0.0


class Accounts:
    """All of one term's. Whatever is entered in a scope counts in three accounts: the total, its tenant's, its model's.

    Args:
        scopes: by their digests. It knows each that something is entered in.
        most_rows: how many tenants have accounts of their own, and how many models.
    """

    def __init__(self, scopes: Mapping[bytes, Scope], *, most_rows: int = MOST_ROWS) -> None:
        self.total = Account()
        self.missed = 0
        """Keys that were asked for and not found; of which scope is not known."""
        self.by_tenant: dict[str, Account] = {}
        self.by_model: dict[str, Account] = {}
        self._scopes = scopes
        self._most_rows = most_rows
        self._of: dict[bytes, tuple[Account, Account, Account]] = {}

    def held(self, scope: bytes, entries: int, nbytes: int) -> None:
        """The directory has so many more entries of a scope, by its digest, and bytes in them; or fewer."""
        for account in self._accounts(scope):
            account.entries += entries
            account.nbytes += nbytes

    def entered(self, name: bytes, entry: Entry) -> None:
        """The directory has a new entry."""
        self.held(name[:DIGEST_BYTES], 1, entry.hit.nbytes)

    def left(self, name: bytes, entry: Entry) -> None:
        """It has it no more."""
        self.held(name[:DIGEST_BYTES], -1, -entry.hit.nbytes)

    def published(self, scope: bytes, nbytes: int, cost_ms: float) -> None:
        """An entry of a scope was published."""
        for account in self._accounts(scope):
            account.published += 1
            account.published_bytes += nbytes
            account.published_ms += cost_ms

    def used(self, scope: bytes, hits: int, nbytes: int, saved_ms: float) -> None:
        """Entries of a scope were hit."""
        for account in self._accounts(scope):
            account.hits += hits
            account.hit_bytes += nbytes
            account.saved_ms += saved_ms

    def figures(self) -> dict[str, int]:
        """The total by name, for `ControllerCore.stats`; no more than a message can carry."""
        total = self.total
        figures: dict[str, float] = {
            "bytes": total.nbytes,
            "hits": total.hits,
            "missed": self.missed,
            "hit_bytes": total.hit_bytes,
            "saved_ms": total.saved_ms,
            "published": total.published,
            "published_bytes": total.published_bytes,
            "published_ms": total.published_ms,
        }
        return {name: min(int(figure), _MOST_FIGURE) for name, figure in figures.items()}

    def _accounts(self, scope: bytes) -> tuple[Account, Account, Account]:
        known = self._of.get(scope)
        if known is None:
            fields = self._scopes[scope]
            tenant = self._row(self.by_tenant, fields.tenant)
            known = self._of[scope] = self.total, tenant, self._row(self.by_model, fields.model)
        return known

    def _row(self, rows: dict[str, Account], name: str) -> Account:
        if name not in rows and len(rows) >= self._most_rows - 1:  # the last is for all others
            name = OTHER
        return rows.setdefault(name, Account())
