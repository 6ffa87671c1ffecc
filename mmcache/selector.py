"""What an invalidation is for: any subset of a key's fields."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from mmcache.errors import InvalidKey
from mmcache.key import EmbeddingKey, Scope, check_field, check_mm_hash


class Selector(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True, forbid_unknown_fields=True):
    """Matches the keys that have all of these values; a field that is not given matches anything.

    Args:
        tenant, model, version, modality, mm_hash: as in `EmbeddingKey`.
        lora: None matches only keys without an adapter.

    Raises:
        InvalidKey: a field is empty, too long or outside its alphabet; the message names it.
    """

    tenant: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    version: str | UnsetType = UNSET
    lora: str | UnsetType | None = UNSET
    modality: str | UnsetType = UNSET
    mm_hash: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        for name, value in self.fields().items():
            if name == "mm_hash":
                check_mm_hash(value)
            elif not (name == "lora" and value is None):
                check_field(name, value)

    @classmethod
    def exactly(cls, key: EmbeddingKey) -> Selector:
        """Matches this key and no other."""
        return cls.of(key.scope, key.mm_hash)

    @classmethod
    def of(cls, scope: Scope, mm_hash: str) -> Selector:
        """Matches the one key that has this scope and mm_hash."""
        return cls(**{name: getattr(scope, name) for name in scope.__struct_fields__}, mm_hash=mm_hash)

    def key(self) -> EmbeddingKey:
        """The one key that it matches. Raises InvalidKey where a field is not given."""
        fields = self.fields()
        if missing := [name for name in self.__struct_fields__ if name not in fields]:
            raise InvalidKey(f"{', '.join(missing)}: not given, so that more than one key may match")
        return EmbeddingKey(**fields)  # type: ignore[arg-type]

    def fields(self) -> dict[str, str | None]:
        """The fields that are given."""
        given = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {name: value for name, value in given if value is not UNSET}

    def matches(self, key: EmbeddingKey) -> bool:
        """Whether an invalidation of this selector is one of `key`."""
        return all(getattr(key, name) == value for name, value in self.fields().items())

    def covers(self, other: Selector) -> bool:
        """Whether it matches all that `other` matches."""
        return self.fields().items() <= other.fields().items()

    def without(self, *names: str) -> Selector:
        """A wider one, which does not look at these fields."""
        return Selector(**{name: value for name, value in self.fields().items() if name not in names})  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.fields().items()) or "everything"
