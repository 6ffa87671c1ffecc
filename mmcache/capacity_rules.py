"""Quotas and ages, as settings write them: `tenant=acme 20GiB`, `model=qwen 30%`; `modality=video 1h`, `any 7d`.

Kinds check and keep the text, so that settings are plain values; `quota_of` and `age_of` read it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from mmcache.errors import InvalidKey
from mmcache.key import Scope, check_field
from mmcache.setting_kinds import BadValue, Kind, parse_duration, parse_size, show

MOST_RULES: Final = 256
_QUOTA_FIELDS: Final = ("tenant", "model")
_ANY: Final = "any"
_SHARE: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)%", re.ASCII)
_MOST_DAYS: Final = 365.0
_DAY_S: Final = 86_400.0


class Quota(NamedTuple):
    """Room that one tenant, or one model, is sure of. Either bytes, or a share of the store's capacity, above 0."""

    field: str
    """`tenant` or `model`."""
    value: str
    nbytes: int | None
    share: float | None

    def of(self, capacity: int) -> float:
        """Bytes of it in a store of so many."""
        return capacity * self.share if self.share is not None else float(self.nbytes or 0)


class AgeRule(NamedTuple):
    """Entries whose scopes have these fields go after so many seconds."""

    fields: Mapping[str, str]
    seconds: float

    def matches(self, scope: Scope) -> bool:
        """Whether it is about a scope."""
        return all(getattr(scope, field) == value for field, value in self.fields.items())


def quota_of(text: str) -> Quota:
    """Raises BadValue."""
    what, _, amount = text.strip().rpartition(" ")
    field, _, value = what.strip().partition("=")
    if field not in _QUOTA_FIELDS:
        raise BadValue(f"must be such as 'tenant=acme 20GiB' or 'model=qwen 30%', not {show(text)}")
    _check_field(field, value)
    match = _SHARE.fullmatch(amount)
    if match is None:
        nbytes = int(amount) if amount.isascii() and amount.isdigit() and len(amount) < 19 else parse_size(amount)
        if not nbytes:
            raise BadValue(f"must be of more than 0 bytes, not {show(text)}")
        return Quota(field, value, nbytes, None)
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise BadValue(f"must be more than 0% and at most 100% of the capacity, not {show(text)}")
    return Quota(field, value, None, share)


def age_of(text: str) -> AgeRule:
    """Raises BadValue."""
    what, _, duration = text.strip().rpartition(" ")
    fields: dict[str, str] = {}
    for part in what.strip().split(","):
        field, equals, value = part.strip().partition("=")
        if field == _ANY and not equals and what.strip() == _ANY:
            continue
        if field not in Scope.__struct_fields__ or not equals:
            raise BadValue(f"must be such as 'any 7d' or 'tenant=acme,modality=video 1h', not {show(text)}")
        if field in fields:
            raise BadValue(f"has {field} twice: {show(text)}")
        _check_field(field, value)
        fields[field] = value
    number = duration.removesuffix("d")
    days = duration.endswith("d") and number.replace(".", "", 1).isdigit() and number.isascii()
    seconds = float(number) * _DAY_S if days else parse_duration(duration)
    if not 1.0 <= seconds <= _MOST_DAYS * _DAY_S:
        raise BadValue(f"must be of 1 second to {_MOST_DAYS:g} days, not {show(text)}")
    return AgeRule(fields, seconds)


def _check_field(field: str, value: str) -> None:
    try:
        check_field(field, value)
    except InvalidKey as error:
        raise BadValue(str(error)) from error


class _Rules(Kind, frozen=True):
    def _check(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)):
            raise BadValue(f"must be a list, not {show(value)}")
        if len(value) > MOST_RULES:
            raise BadValue(f"has {len(value)} of them; at most {MOST_RULES} are allowed")
        for one in value:
            if not isinstance(one, str):
                raise BadValue(f"must be a list of texts, not one with {show(one)}")
        return tuple(value)


class Quotas(_Rules, frozen=True):
    """A list of quotas, at most one for each tenant and each model. Shares of one kind are 100 % together at most."""

    def _check(self, value: object) -> tuple[str, ...]:
        texts = super()._check(value)
        quotas = [quota_of(text) for text in texts]
        (most, times), *_ = Counter((quota.field, quota.value) for quota in quotas).most_common(1) or [(("", ""), 0)]
        if times > 1:
            raise BadValue(f"has {most[0]}={most[1]} {times} times")
        for field in _QUOTA_FIELDS:
            share = sum(quota.share or 0.0 for quota in quotas if quota.field == field)
            if share > 1 + 1e-9:
                raise BadValue(f"has {field}s with {100 * share:g}% of the capacity together; at most 100% is there")
        return texts


class Ages(_Rules, frozen=True):
    """A list of ages; where several match, the lowest counts."""

    def _check(self, value: object) -> tuple[str, ...]:
        texts = super()._check(value)
        for text in texts:
            age_of(text)
        return texts
