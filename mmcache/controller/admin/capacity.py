"""What the cache holds, for whom, and what that saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from mmcache.controller import accounts
from mmcache.controller.admin.access import AtDesk, Viewer
from mmcache.controller.views import AccountsView

router = APIRouter(prefix="/v1", tags=["capacity"])

EVICTED: Final = "evicted."
"""How counts begin in `ControllerCore.stats()` that say why entries were evicted."""
PARTS: Final = ("removing", "pinned")
"""States whose entries and bytes `ControllerCore.stats()` tells of, as `entries_removing` and so on."""


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class Account(_Answer):
    """What is held now, and since the controller's start: what was hit, and what was published."""

    entries: Annotated[int, Field(description="In the directory now.")]
    nbytes: Annotated[int, Field(description="Theirs.")]
    hits: Annotated[int, Field(description="Keys that clients found.")]
    hit_bytes: Annotated[int, Field(description="Of the entries that were found, each time.")]
    saved_ms: Annotated[float, Field(description="What they had cost to encode, each time.")]
    published: int
    published_bytes: int
    published_ms: Annotated[float, Field(description="What those published cost to encode.")]


class NamedAccount(Account):
    """One tenant's or model's. `(other)` is that of all beyond the first 999."""

    name: Annotated[str, Field(examples=["default"])]


class HitRatios(_Answer):
    """Between 0 and 1; null: nothing was asked for, or published."""

    entries: Annotated[float | None, Field(description="hits / (hits + missed)")]
    nbytes: Annotated[float | None, Field(description="hit_bytes / (hit_bytes + published_bytes)")]
    encode_time: Annotated[float | None, Field(description="saved_ms / (saved_ms + published_ms)")]


class Held(_Answer):
    """Entries in one state."""

    entries: int
    nbytes: int


class States(_Answer):
    """Every entry is either present or being removed; pinned ones are present."""

    present: Held
    removing: Annotated[Held, Field(description="Chosen to be evicted, and not gone yet.")]
    pinned: Held


class Room(_Answer):
    """The store's, as the controller knows it; null: it does not."""

    capacity_bytes: int | None
    used_bytes: int | None


class Capacity(_Answer):
    """What there is at one moment. All counts begin with the controller's term."""

    term: str
    total: Account
    missed: Annotated[int, Field(description="Keys that clients did not find; of whom is not known.")]
    hit_ratios: HitRatios
    tenants: list[NamedAccount]
    models: list[NamedAccount]
    states: States
    evicted: Annotated[dict[str, int], Field(description="Entries, by reason.", examples=[{"watermark": 120}])]
    store: Room


@router.get("/capacity")
async def capacity(_: Viewer, desk: AtDesk) -> Capacity:
    """What is held and was saved: in all, by tenant, by model and by state; what was evicted, and the store's room."""
    term, held, stats = await desk.call(lambda core, _: (core.term, core.views.accounts(), core.stats()))
    return made_of(held, stats, term=term)


def made_of(held: AccountsView, stats: Mapping[str, int], *, term: int) -> Capacity:
    """The answer. `stats` are those of `ControllerCore.stats()`, of which some may be missing."""
    total = held.total
    return Capacity(
        term=str(term),
        total=Account(**msgspec.structs.asdict(total)),
        missed=held.missed,
        hit_ratios=HitRatios(
            entries=ratio(total.hits, held.missed),
            nbytes=ratio(total.hit_bytes, total.published_bytes),
            encode_time=ratio(total.saved_ms, total.published_ms),
        ),
        tenants=_rows(held.by_tenant),
        models=_rows(held.by_model),
        states=states_of(total, stats),
        evicted=evicted_of(stats),
        store=Room(capacity_bytes=stats.get("store_capacity_bytes"), used_bytes=stats.get("store_used_bytes")),
    )


def states_of(total: accounts.Account, stats: Mapping[str, int]) -> States:
    """By the total and by what `ControllerCore.stats()` says of entries that are being removed or pinned."""
    parts = {
        state: Held(entries=stats.get(f"entries_{state}", 0), nbytes=stats.get(f"bytes_{state}", 0)) for state in PARTS
    }
    removing = parts["removing"]
    present = Held(entries=total.entries - removing.entries, nbytes=total.nbytes - removing.nbytes)
    return States(present=present, **parts)


def evicted_of(stats: Mapping[str, int]) -> dict[str, int]:
    """Evicted entries by reason."""
    return {name.removeprefix(EVICTED): count for name, count in stats.items() if name.startswith(EVICTED)}


def ratio(part: float, rest: float) -> float | None:
    """A part of the whole; None where there is nothing."""
    return part / (part + rest) if part + rest > 0 else None


def _rows(named: Mapping[str, accounts.Account]) -> list[NamedAccount]:
    """Those with the most bytes first."""
    rows = [NamedAccount(name=name, **msgspec.structs.asdict(account)) for name, account in named.items()]
    return sorted(rows, key=lambda row: (-row.nbytes, -row.hit_bytes, row.name))
