"""Which entry goes, where tenants and models have quotas.

Entries of one tenant and one model that have quotas, or have none, are a group, with a policy of its own. A quota is
room that its owner is sure of; unused, it is lent to whoever wants it. So when room is needed, it is given back first
by the group that is furthest above what both its tenant and its model are sure of; within a group the policy chooses.
Tenants without a quota are as one, which has what the others' quotas leave; and so are models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from mmcache.capacity_rules import Quota
from mmcache.controller.eviction import Policy
from mmcache.key import DIGEST_BYTES, Scope

_NOBODY: Final = 1.0
"""Bytes that those are sure of for whom nothing is left: not 0, to divide by."""


class Victim(NamedTuple):
    """An entry that is to go; `borrowed`: its group had more than it is sure of, and others had not."""

    name: bytes
    borrowed: bool


class _Group:
    """Entries whose tenant and model have these quotas; None: theirs have none."""

    def __init__(self, tenant: str | None, model: str | None, policy: Policy) -> None:
        self.tenant = tenant
        self.model = model
        self.policy = policy
        self.leaving = 0
        """Bytes of its entries that are on their way out."""

    @property
    def nbytes(self) -> int:
        """What it has, without what is on its way out."""
        return self.policy.nbytes - self.leaving


class Shares:
    """All entries, each in its group.

    Args:
        quotas: at most one for each tenant and each model.
        policy: makes one for each group.
        scopes: by their digests, with which names begin.
    """

    def __init__(self, quotas: tuple[Quota, ...], policy: Callable[[], Policy], scopes: Mapping[bytes, Scope]) -> None:
        self._quotas = {(quota.field, quota.value): quota for quota in quotas}
        self._policy = policy
        self._scopes = scopes
        self._groups: dict[tuple[str | None, str | None], _Group] = {}
        self._by_scope: dict[bytes, _Group] = {}
        self._sure: dict[tuple[str, str | None], float] = {}
        """Bytes that a tenant or a model is sure of; under None all those without a quota, unless nobody has one."""
        self.scaled = False
        """Whether the quotas are more than there is, and each counts for less."""
        self.nbytes = 0
        """Of all entries, also those on their way out."""
        self.looked_at = 0
        """Groups and entries that its choices have looked at so far: what they have cost."""

    def resize(self, capacity: int, room: float) -> None:
        """The store has so much capacity, of which so much is to be used."""
        self._sure.clear()
        self.scaled = False
        for field in ("tenant", "model"):
            sizes = {value: quota.of(capacity) for (kind, value), quota in self._quotas.items() if kind == field}
            if not sizes:
                continue
            total = sum(sizes.values())
            self.scaled |= 0 < capacity * (1 + 1e-9) < total  # of a store without memory it is not the quotas
            scale = min(1.0, room / total) if total else 1.0  # of what is above the watermark nobody can be sure
            self._sure.update(((field, value), max(_NOBODY, nbytes * scale)) for value, nbytes in sizes.items())
            self._sure[field, None] = max(_NOBODY, room - total * scale)

    def insert(self, name: bytes, nbytes: int, cost_ms: float) -> None:
        """An entry has been published, or was found. Raises KeyError for one of no known scope."""
        policy = self._group(name).policy
        self.nbytes -= policy.nbytes
        policy.insert(name, nbytes, cost_ms)
        self.nbytes += policy.nbytes

    def access(self, name: bytes, count: int) -> None:
        """An entry has been read so often."""
        self._group(name).policy.access(name, count)

    def remove(self, name: bytes) -> None:
        """An entry is gone."""
        policy = self._group(name).policy
        self.nbytes -= policy.nbytes
        policy.remove(name)
        self.nbytes += policy.nbytes

    def set_aside(self, name: bytes) -> bool:
        """Do not choose this one until it is put back; returns whether it is there and was not aside."""
        return self._group(name).policy.set_aside(name)

    def put_back(self, name: bytes) -> None:
        """Choose from this one again."""
        self._group(name).policy.put_back(name)

    def leaving(self, name: bytes, nbytes: int) -> None:
        """So many bytes of an entry are on their way out, or, negative, are not any more."""
        self._group(name).leaving += nbytes

    def choose(self) -> Victim | None:
        """The entry that is to go next, which is set aside. None: there is none to choose."""
        if len(self._groups) == 1:
            (group,) = self._groups.values()
            name = self._choose_from(group)
            return None if name is None else Victim(name, borrowed=False)
        over = self._over()
        self.looked_at += len(self._groups)
        for group in sorted(over, key=lambda one: over[one], reverse=True):
            name = self._choose_from(group)
            if name is not None:
                return Victim(name, borrowed=over[group] > 1.0 and min(over.values()) <= 1.0)
        return None

    def _choose_from(self, group: _Group) -> bytes | None:
        policy = group.policy
        self.looked_at -= policy.looked_at
        name = policy.choose()
        self.looked_at += policy.looked_at
        return name

    def _over(self) -> dict[_Group, float]:
        """How much each group has of what both its tenant and its model are sure of: the lower of both."""
        used: dict[tuple[str, str | None], int] = {}
        for group in self._groups.values():
            for whose in (("tenant", group.tenant), ("model", group.model)):
                used[whose] = used.get(whose, 0) + group.nbytes
        sure = self._sure
        return {
            group: min(
                used[whose] / sure[whose] if whose in sure else math.inf
                for whose in (("tenant", group.tenant), ("model", group.model))
            )
            for group in self._groups.values()
            if group.nbytes > 0
        }

    def _group(self, name: bytes) -> _Group:
        digest = name[:DIGEST_BYTES]
        group = self._by_scope.get(digest)
        if group is None:
            scope = self._scopes[digest]
            tenant = scope.tenant if ("tenant", scope.tenant) in self._quotas else None
            model = scope.model if ("model", scope.model) in self._quotas else None
            group = self._groups.get((tenant, model))
            if group is None:
                group = self._groups[tenant, model] = _Group(tenant, model, self._policy())
            self._by_scope[digest] = group
        return group
