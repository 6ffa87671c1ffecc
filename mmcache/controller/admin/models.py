"""What requests and answers of the API look like. Unknown fields are refused; times are seconds since 1970."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mmcache.control.messages import MAX_BATCH, MAX_PIN_MS
from mmcache.key import EmbeddingKey
from mmcache.selector import Selector

MAX_KEYS: Final = 1_000
MAX_PAGE: Final = 1_000
MAX_WAIT_S: Final = 300.0
_MAX_NUMBER: Final = (1 << 63) - 1

Tenant = Annotated[str, Field(pattern=r"^[!-~]{1,64}$", examples=["default"])]
Model = Annotated[str, Field(pattern=r"^[!-~]{1,256}$", examples=["google/siglip-base-patch16-224"])]
Version = Annotated[str, Field(pattern=r"^[!-~]{1,128}$", examples=["3"])]
Lora = Annotated[str, Field(pattern=r"^[!-~]{1,128}$", examples=["9f86d081884c7d65"])]
Modality = Annotated[str, Field(pattern=r"^[!-~]{1,32}$", examples=["image"])]
MmHash = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        description="Any text of at most 1,024 bytes in UTF-8.",
        examples=["5d41402abc4b2a76b9719d911017c592"],
    ),
]
Number = Annotated[int, Field(ge=1, le=_MAX_NUMBER)]
Cursor = Annotated[
    str,
    Field(pattern=r"^[0-9a-f]{4}([0-9a-f]{124})?$", description="`next` of the page before; absent for the first."),
]
Limit = Annotated[int, Field(ge=1, le=MAX_PAGE, description="Most of a page.")]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("may hold printable characters only")
    return text


Printable = Annotated[str, AfterValidator(_printable)]
UnixTime = Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]
_NO_FIELD: Final[Any] = None
"""Of a field that is not given; which are is in `model_fields_set`."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


# Requests


class SelectorFields(_Strict):
    """Matches entries that have all of these values; a field that is not given matches anything."""

    tenant: Tenant = _NO_FIELD
    model: Model = _NO_FIELD
    version: Version = _NO_FIELD
    lora: Annotated[Lora | None, Field(description="null: only entries without an adapter.")] = None
    modality: Modality = _NO_FIELD
    mm_hash: MmHash = _NO_FIELD

    def selector(self) -> Selector:
        """The selector. Raises InvalidKey."""
        return Selector(**{name: getattr(self, name) for name in self.model_fields_set})


class NewInvalidation(_Strict):
    """Nothing that matches may be served any more."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"selector": {"model": "google/siglip", "version": "3"}, "reason": "new weights", "wait": True},
                {"selector": {"model": "google/siglip", "lora": None}, "dry_run": True},
                {"selector": {}, "all": True, "reason": "start anew"},
                {"selector": {}, "producer": "encoder-3", "created_from": 1790000000.0, "reason": "a broken GPU"},
            ]
        }
    )

    selector: SelectorFields
    producer: Annotated[
        Printable | None,
        Field(min_length=1, max_length=128, description="Only what this client published, of what is known now."),
    ] = None
    created_from: Annotated[UnixTime | None, Field(description="Only what was published from then on.")] = None
    created_until: Annotated[UnixTime | None, Field(description="Only what was published up to then.")] = None
    all: Annotated[bool, Field(strict=True, description="With an empty selector: everything there is.")] = False
    reason: Annotated[Printable, Field(max_length=512, description="For people; printable, and kept with it.")] = ""
    wait: Annotated[bool, Field(strict=True, description="Answer once it is complete, or `timeout` is over.")] = False
    timeout: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False, description="Seconds.")] = 30.0
    clear_engines: Annotated[
        bool,
        Field(
            strict=True,
            description="Once it is complete, also clear the caches that the engines of `engines.urls` hold; "
            "needs `wait`.",
        ),
    ] = False
    dry_run: Annotated[bool, Field(strict=True, description="Only count the known entries that match.")] = False


class Key(_Strict):
    """The name of one entry."""

    model: Model
    version: Version
    mm_hash: MmHash
    lora: Lora | None = None
    modality: Modality = "image"
    tenant: Tenant = "default"

    def key(self) -> EmbeddingKey:
        """The key. Raises InvalidKey."""
        return EmbeddingKey(**self.model_dump())


class Keys(_Strict):
    """Keys to look up."""

    keys: Annotated[
        list[Key],
        Field(
            min_length=1,
            max_length=MAX_KEYS,
            examples=[[{"model": "google/siglip", "version": "3", "mm_hash": "5d41402abc4b2a76b9719d911017c592"}]],
        ),
    ]


class NewPin(_Strict):
    """Keep what matches from eviction for a time: by a selector, or by keys."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"selector": {"model": "google/siglip", "version": "3"}, "ttl": 3600.0, "reason": "a launch"},
                {"keys": [{"model": "google/siglip", "version": "3", "mm_hash": "5d41402abc4b2a76"}], "ttl": 60.0},
            ]
        }
    )

    selector: Annotated[SelectorFields | None, Field(description="At least one field of it.")] = None
    keys: Annotated[list[Key] | None, Field(min_length=1, max_length=MAX_BATCH, description="Instead.")] = None
    ttl: Annotated[
        float, Field(gt=0, le=MAX_PIN_MS / 1000, allow_inf_nan=False, strict=True, description="Seconds from now.")
    ]
    reason: Annotated[Printable, Field(max_length=512, description="For people; printable, and kept with it.")] = ""


class NumberedPage(_Strict):
    """The newest first, below a number."""

    before: Annotated[Number | None, Field(description="`next` of the page before; absent for the newest.")] = None
    limit: Limit = 100


class AuditPage(NumberedPage):
    """The newest records first."""

    action: Annotated[Printable | None, Field(min_length=1, max_length=64, examples=["invalidate"])] = None
    actor: Annotated[Printable | None, Field(min_length=1, max_length=128, examples=["alice"])] = None


class SessionsPage(_Strict):
    """Sessions in the order of their ids, which are random."""

    after: Annotated[str | None, Field(pattern=r"^[0-9]{1,19}$", description="`next` of the page before.")] = None
    limit: Limit = 100


class EntriesPage(_Strict):
    """Entries that match all that is given."""

    tenant: Tenant | None = None
    model: Model | None = None
    version: Version | None = None
    lora: Lora | None = None
    no_lora: Annotated[bool, Field(description="Only entries without an adapter.")] = False
    modality: Modality | None = None
    mm_hash: MmHash | None = None
    producer: Annotated[Printable | None, Field(min_length=1, max_length=128, description="The client's name.")] = None
    created_from: UnixTime | None = None
    created_until: UnixTime | None = None
    order: Annotated[
        Literal["place", "hottest"],
        Field(description="hottest: the `limit` that were used most, without further pages. It looks at all entries."),
    ] = "place"
    cursor: Cursor | None = None
    limit: Limit = 100


class Patience(_Strict):
    """How long to wait."""

    wait: Annotated[
        float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False, description="Seconds until it is to be complete.")
    ] = 0.0


# Answers


class Alive(_Answer):
    """The process runs, and says nothing more."""

    status: Annotated[str, Field(examples=["alive"])]


class Readiness(_Answer):
    """Whether it can serve."""

    ready: bool
    checks: Annotated[
        dict[str, str],
        Field(examples=[{"controller": "ok", "state": "ok", "store": "ok"}], description="ok, or why not."),
    ]


class AwaitedSession(_Answer):
    """A session that may still serve what was invalidated."""

    name: str
    host: str
    most_ms: Annotated[int, Field(description="For how long at most.")]


class Invalidation(_Answer):
    """One number of the sequence."""

    number: Number
    selector: Annotated[dict[str, str | None], Field(examples=[{"model": "google/siglip", "version": "3"}])]
    reason: str
    actor: str
    at: UnixTime
    idempotency_key: str | None
    complete: Annotated[bool, Field(description="No client serves what it is for any more.")]
    completed_at: UnixTime | None
    waiting: Annotated[int, Field(description="Sessions that it waits for.")]


class FollowedInvalidation(Invalidation):
    """One number, and whom it waits for."""

    unbound: Annotated[int, Field(description="Sessions that the guarantee excludes: client.on_stale is serve.")]
    awaited: Annotated[list[AwaitedSession], Field(description="Some of those that it waits for.")]


class ResetCache(_Answer):
    """What became of one cache of an engine."""

    endpoint: Annotated[str, Field(examples=["/reset_encoder_cache"])]
    ok: bool
    detail: Annotated[str, Field(description="Why it was not cleared, and what to do.")]


class ClearedEngine(_Answer):
    """What became of one engine's caches. Whatever it is, the invalidation stands."""

    url: Annotated[str, Field(examples=["http://127.0.0.1:8000"])]
    ok: Annotated[bool, Field(description="All of them were cleared.")]
    results: list[ResetCache]


class MadeInvalidation(FollowedInvalidation):
    """One number that was asked for, and what became of engines."""

    entries: Annotated[
        int | None,
        Field(
            description="By producer or time: how many entries, each with a number; this is the last. null: unknown."
        ),
    ]
    engines: Annotated[list[ClearedEngine], Field(description="With `clear_engines`: one for each of `engines.urls`.")]


class MadePin(_Answer):
    """What is pinned."""

    ids: Annotated[list[Number], Field(description="One for the selector, or one a key.")]
    entries: Annotated[int, Field(description="Known entries that match.")]
    nbytes: Annotated[int, Field(description="Their size in the store.")]
    until: Annotated[UnixTime, Field(description="When the first of the pins ends.")]


class Pin(_Answer):
    """One pin."""

    id: Number
    selector: Annotated[dict[str, str | None], Field(examples=[{"model": "google/siglip", "version": "3"}])]
    until: UnixTime
    reason: str
    actor: Annotated[str, Field(description="Who asked for it first.")]


class PinList(_Answer):
    """A page, and how much all pins keep."""

    pins: list[Pin]
    next: Number | None
    entries: Annotated[int, Field(description="Entries that are kept.")]
    nbytes: Annotated[int, Field(description="Their size in the store.")]
    most_nbytes: Annotated[int | None, Field(description="How much may be kept; null: not known yet.")]


class EndedPins(_Answer):
    """Pins that ended."""

    ids: list[Number]


class Matches(_Answer):
    """What an invalidation is for now; without `dry_run`: nothing."""

    dry_run: bool
    matches: Annotated[int, Field(description="Known entries that match.")]
    counted_all: Annotated[bool, Field(description="False: `timeout` was over first, and there may be more.")]


class Invalidations(_Answer):
    """A page."""

    invalidations: list[Invalidation]
    next: Number | None


class Entry(_Answer):
    """One entry that the controller knows; the store may have evicted it meanwhile."""

    name: Annotated[
        str,
        Field(
            description="Under which the store has it.",
            examples=[f"mmc1.0123456789abcdef.{'0' * 64}.{'f' * 64}.0"],
        ),
    ]
    key: Key
    generation: int
    nbytes: Annotated[int, Field(description="Of the object, with its prefix.")]
    cost_ms: Annotated[float, Field(description="What its encoding took, as its publisher said.")]
    uses: Annotated[int, Field(description="How often clients read it, as far as the controller knows.")]
    producer: str
    created: UnixTime


class Tensor(_Answer):
    """One tensor of an entry."""

    name: str
    dtype: str
    shape: list[int]


class EntryInFull(Entry):
    """One entry with what its publisher says of it."""

    tensors: list[Tensor] | None
    meta: dict[str, Any] | None


class Entries(_Answer):
    """A page. It may be short, or empty, before the last: that is the one without `next`."""

    entries: list[Entry]
    next: Cursor | None


class Found(_Answer):
    """One answer a key, in their order; null: nothing is known."""

    results: list[Entry | None]


class Session(_Answer):
    """One client's session."""

    session: Annotated[str, Field(description="A random number.", examples=["1803475932884275"])]
    name: Annotated[str, Field(description="Of the client.", examples=["encoder-0"])]
    host: str
    pid: int
    live: Annotated[bool, Field(description="False: it has ended, but its client may not know yet.")]
    serves_stale: bool
    acknowledged: Annotated[int, Field(description="The last invalidation that it said it heeds.")]
    heard_s_ago: float
    trusted_for_s: Annotated[float, Field(description="For how long it may serve if it is never heard of again.")]


class SessionList(_Answer):
    """A page."""

    sessions: list[Session]
    next: str | None


class Stats(_Answer):
    """Sizes of the controller's tables now, and counts since its start."""

    term: str
    lineage: str
    figures: Annotated[dict[str, int], Field(examples=[{"sessions": 4, "entries": 1200, "head": 7}])]


class AuditRecord(_Answer):
    """What somebody did."""

    id: Number
    at: UnixTime
    actor: str
    role: str
    action: str
    detail: dict[str, Any]
    outcome: str


class Audit(_Answer):
    """A page."""

    records: list[AuditRecord]
    next: Number | None


class Fault(_Answer):
    """What is wrong with one field."""

    where: str
    detail: str


class ProblemDocument(_Answer):
    """RFC 9457."""

    type: Annotated[str, Field(examples=["urn:mmcache:problem:selector-empty"])]
    title: Annotated[str, Field(examples=["Unprocessable Content"])]
    status: Annotated[int, Field(examples=[422])]
    detail: Annotated[str, Field(examples=["the selector is empty: give a field, or `all` for everything there is"])]
    errors: list[Fault] = []
