"""Every message between clients and controller: msgpack arrays, strictly decoded, size-bounded, versioned in the hello.

A client opens a session with `Hello`; everything after it carries the term and session id of the `Welcome`, and comes
over the same connection. Keys travel as their scope and 32-byte digests of mm_hash; the mm_hash itself goes with the
commit only. Durations are milliseconds, and relative, since clocks of two machines do not compare.

Requests that have an answer carry a request number, chosen by the client and growing within a session; sending one
again is harmless. Results stand in the order of the request's digests, groups one after another.

Invalidations are pushed, each push saying which number it follows, and acknowledged with how far the receiver has come.
"""

from __future__ import annotations

import enum
import sys
from typing import Annotated, Final, TypeVar

import msgspec

from mmcache.key import DIGEST_BYTES, Scope, check_mm_hash
from mmcache.selector import Selector

PROTOCOL_VERSION: Final = 4
MAX_MESSAGE_BYTES: Final = 1 << 20
"""A larger frame is refused unread."""
MAX_BATCH: Final = 4096
"""Most keys in one message."""
MAX_INFO_BYTES: Final = 4096
MAX_USES: Final = (1 << 31) - 1
"""Most uses of one entry, and most misses, that one message tells of."""
MAX_FIGURES: Final = 256
"""Most figures in one answer to an `Inspect`."""
MAX_PUSH: Final = 512
"""Most invalidations in one push: as many fit into a message, however large."""
MAX_REASON: Final = 512
"""Most characters of why something was invalidated, pinned, or refused."""
MAX_PIN_MS: Final = 30 * 86_400_000
"""Longest time for which something is pinned. It may be pinned again."""

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
U64 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
ObjectBytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 47)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=86_400_000)]
PinMilliseconds = Annotated[int, msgspec.Meta(ge=0, le=MAX_PIN_MS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
Lineage = Annotated[str, msgspec.Meta(pattern="^[a-z0-9]{1,32}$")]
Info = Annotated[bytes, msgspec.Meta(max_length=MAX_INFO_BYTES)]
"""Opaque to the controller: the entry's tensors and metadata, msgpack as in its prefix."""


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages; a message is an array whose first element is its tag."""


class _Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of what stands inside messages."""


class KeyGroup(_Part, frozen=True):
    """Keys of one scope."""

    scope: Scope
    digests: Annotated[list[Digest], msgspec.Meta(max_length=MAX_BATCH)]


Groups = Annotated[list[KeyGroup], msgspec.Meta(max_length=MAX_BATCH)]


# Client to controller


class Hello(_Message, frozen=True, tag=1, forbid_unknown_fields=False):
    """Opens a session. `name` is a label for people; nothing is decided by it.

    Of another version it may have more or fewer fields, so that the version can be told to be the trouble.

    Args:
        lineage, applied: which invalidations this client has already: those of this lineage up to this number.
        term: the last in which it had a session of that lineage. A database in which that term cannot have reached that
            number has gone back.
        serves_stale: it goes on serving what may be stale while it has no session: the guarantee excludes it.
    """

    version: int
    name: Name
    host: Text
    pid: U64
    lineage: Annotated[str, msgspec.Meta(pattern="^[a-z0-9]{0,32}$")] = ""
    applied: U64 = 0
    serves_stale: bool = False
    term: U64 = 0


class Heartbeat(_Message, frozen=True, tag=2):
    """Sent every TTL/4. `number` grows by one; `applied` is the unbroken prefix of the invalidation sequence."""

    term: U64
    session: U64
    number: U64
    applied: U64


class Acquire(_Message, frozen=True, tag=3):
    """Who computes these? `wait_ms` bounds how long this request waits for another's result; 0: it does not."""

    term: U64
    session: U64
    request: U64
    wait_ms: Milliseconds
    groups: Groups


class Renew(_Message, frozen=True, tag=4):
    """Still computing under these claims."""

    term: U64
    session: U64
    request: U64
    tokens: Annotated[list[U64], msgspec.Meta(max_length=MAX_BATCH)]


class Commitment(_Part, frozen=True, gc=False):
    """One entry that its publisher has seen in the store. `token` 0: published without a claim.

    Raises InvalidKey, a ValueError, for an mm_hash that cannot be one.
    """

    mm_hash: str
    generation: U64
    token: U64
    nbytes: ObjectBytes
    cost_ms: Annotated[float, msgspec.Meta(ge=0.0, le=sys.float_info.max)]
    info: Info

    def __post_init__(self) -> None:
        check_mm_hash(self.mm_hash)


class CommitGroup(_Part, frozen=True):
    """Commitments of one scope."""

    scope: Scope
    entries: Annotated[list[Commitment], msgspec.Meta(max_length=MAX_BATCH)]


class Commit(_Message, frozen=True, tag=5):
    """These entries are readable; enter them in the directory and tell the waiters."""

    term: U64
    session: U64
    request: U64
    groups: Annotated[list[CommitGroup], msgspec.Meta(max_length=MAX_BATCH)]


class AbortReason(enum.IntEnum):
    """Why a claim was given up; it decides what happens to the waiters."""

    FAILED = 1
    """The computation or its publication failed: the next waiter gets the claim."""
    UNWANTED = 2
    """Nobody here needs it any more: the next waiter gets the claim."""
    NO_ROOM = 3
    """The store or the pool has no room: all waiters are released at once, to compute without claims."""
    HELD = 4
    """The name is of no use for now: as NO_ROOM, and nobody gets a claim on it until the store lets it go."""


class Abort(_Message, frozen=True, tag=6):
    """Gives up claims. It has no answer."""

    term: U64
    session: U64
    reason: AbortReason
    tokens: Annotated[list[U64], msgspec.Meta(max_length=MAX_BATCH)]


class Leave(_Message, frozen=True, tag=7):
    """Stops waiting for all that acquire `request` still waits for. It has no answer."""

    term: U64
    session: U64
    request: U64


class Missing(_Part, frozen=True):
    """An entry that the directory promised and the store did not deliver. `revision` is the promise's."""

    scope: Scope
    digest: Digest
    revision: U64


class Report(_Message, frozen=True, tag=8):
    """Entries that were promised and are missing or fail verification. It has no answer."""

    term: U64
    session: U64
    entries: Annotated[list[Missing], msgspec.Meta(max_length=MAX_BATCH)]


class AbandonReason(enum.IntEnum):
    """Why a name in the store is of no use."""

    HELD = 1
    """A dead writer holds it: puts return 0 and store nothing."""
    CORRUPT = 2
    """What lies there is not the entry, and a put would not replace it."""


class Abandoned(_Part, frozen=True):
    """A key whose name at a generation is of no use. `token`, for HELD, is the sender's claim on it, which this ends.

    Raises InvalidKey, a ValueError, for an mm_hash that cannot be one.
    """

    scope: Scope
    mm_hash: str
    generation: U64
    token: U64
    reason: AbandonReason

    def __post_init__(self) -> None:
        check_mm_hash(self.mm_hash)


class Abandon(_Message, frozen=True, tag=16):
    """Give these keys new names, by an invalidation of exactly each, unless there were too many of late.

    It has no answer. A claim that ends by it without an invalidation ends as by an abort of HELD.
    """

    term: U64
    session: U64
    entries: Annotated[list[Abandoned], msgspec.Meta(max_length=MAX_BATCH)]


class Lookup(_Message, frozen=True, tag=9):
    """What does the directory know of these? Claims nothing."""

    term: U64
    session: U64
    request: U64
    groups: Groups


class Uses(_Part, frozen=True):
    """How often keys of one scope were found: for each digest of an mm_hash a count. `scope` is the scope's digest.

    Raises ValueError for digests and counts that are not as many.
    """

    scope: Digest
    digests: Annotated[list[Digest], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]
    counts: Annotated[
        list[Annotated[int, msgspec.Meta(ge=1, le=MAX_USES)]], msgspec.Meta(min_length=1, max_length=MAX_BATCH)
    ]

    def __post_init__(self) -> None:
        if len(self.digests) != len(self.counts):
            raise ValueError(f"{len(self.counts)} counts for {len(self.digests)} digests")


class Used(_Message, frozen=True, tag=17):
    """What was read since the last one, sent right before a heartbeat. It has no answer, and one that is lost is lost.

    `missed` is how many keys were asked for and not found. Raises ValueError for more than MAX_BATCH digests in all.
    """

    term: U64
    session: U64
    groups: Annotated[list[Uses], msgspec.Meta(max_length=MAX_BATCH)]
    missed: Annotated[int, msgspec.Meta(ge=0, le=MAX_USES)]

    def __post_init__(self) -> None:
        if sum(len(group.digests) for group in self.groups) > MAX_BATCH:
            raise ValueError(f"more than {MAX_BATCH} digests in one message")


class Goodbye(_Message, frozen=True, tag=10):
    """Ends the session at once: its claims pass on."""

    term: U64
    session: U64


class Inspect(_Message, frozen=True, tag=11):
    """How large are the controller's tables, and what has it counted? For people; nothing is decided by it."""

    term: U64
    session: U64
    request: U64


class Applied(_Message, frozen=True, tag=12):
    """All invalidations up to this number count here by now. It has no answer."""

    term: U64
    session: U64
    applied: U64


class Resend(_Message, frozen=True, tag=13):
    """A push did not follow what was received: push again what comes after this number. It has no answer but that."""

    term: U64
    session: U64
    after: U64


class Invalidate(_Message, frozen=True, tag=14):
    """Nothing that matches may be served any more. With the same `idempotency` it is the same invalidation."""

    term: U64
    session: U64
    request: U64
    selector: Selector
    reason: Text
    idempotency: Annotated[str, msgspec.Meta(max_length=128)]


class Follow(_Message, frozen=True, tag=15):
    """Tell once invalidation `number` is complete, or after `wait_ms` how far it is."""

    term: U64
    session: U64
    request: U64
    number: U64
    wait_ms: Milliseconds


class PinnedKeys(_Part, frozen=True):
    """Keys of one scope. Raises InvalidKey, a ValueError, for an mm_hash that cannot be one."""

    scope: Scope
    mm_hashes: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]

    def __post_init__(self) -> None:
        for mm_hash in self.mm_hashes:
            check_mm_hash(mm_hash)


class PinSubject(_Part, frozen=True):
    """What pins are for: a selector, or keys, of which each has a pin of its own, in their order."""

    selector: Selector | None
    keys: Annotated[list[PinnedKeys], msgspec.Meta(max_length=MAX_BATCH)]

    def selectors(self) -> tuple[Selector, ...]:
        """One for each pin."""
        keys = [Selector.of(group.scope, mm_hash) for group in self.keys for mm_hash in group.mm_hashes]
        return tuple(keys) if self.selector is None else (self.selector, *keys)


class Pin(_Message, frozen=True, tag=18):
    """Keep what matches for `ttl_ms` from now. Sent again, it is the same pin, which lasts until later."""

    term: U64
    session: U64
    request: U64
    subject: PinSubject
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIN_MS)]
    reason: Text


class Unpin(_Message, frozen=True, tag=19):
    """End the pins that have these ids, and those of exactly this. What is not pinned is passed over."""

    term: U64
    session: U64
    request: U64
    ids: Annotated[list[U64], msgspec.Meta(max_length=MAX_BATCH)]
    subject: PinSubject


ClientMessage = (
    Hello
    | Heartbeat
    | Acquire
    | Renew
    | Commit
    | Abort
    | Leave
    | Report
    | Lookup
    | Goodbye
    | Inspect
    | Applied
    | Resend
    | Invalidate
    | Follow
    | Abandon
    | Used
    | Pin
    | Unpin
)


# Controller to client


class Welcome(_Message, frozen=True, tag=65):
    """A session begins. Its term is the controller's, its number random; `lease_ms` and `hold_ms` are the store's.

    Entries of fewer embeddings than `min_embeddings`, or of more than `max_bytes`, are not to be published.

    Invalidations up to `head` follow as pushes: after `after`, which is 0 or what the hello said to have.
    """

    version: int
    term: U64
    session: U64
    ttl_ms: Milliseconds
    head: U64
    lineage: Lineage
    lease_ms: Milliseconds
    hold_ms: Milliseconds
    after: U64
    min_embeddings: U64 = 0
    max_bytes: U64 = (1 << 63) - 1


class HelloAgain(_Message, frozen=True, tag=66):
    """The session is not known here (any more); open another over a new connection."""

    reason: Text


class HeartbeatAnswer(_Message, frozen=True, tag=67):
    """Answers heartbeat `number`; `head` is the newest number of the invalidation sequence."""

    term: U64
    session: U64
    number: U64
    head: U64


class Hit(_Part, frozen=True, gc=False, tag=0):
    """It is in the directory. `revision` identifies this promise in a `Report`."""

    generation: U64
    revision: U64
    nbytes: U64
    info: Info


class Granted(_Part, frozen=True, gc=False, tag=1):
    """Compute it: a claim for `claim_ms` from now, renewable."""

    generation: U64
    token: U64
    claim_ms: Milliseconds


class Waiting(_Part, frozen=True, tag=2):
    """Another is computing; a `Resolved` will tell."""


CLAIMED: Final = "claimed"
"""Why an `Unclaimed` is one: another computes, and the request did not ask to wait."""
INVALIDATED: Final = "invalidated"
"""Or: what was waited for is of an old generation. Ask again."""


class Unclaimed(_Part, frozen=True, tag=3):
    """Compute for yourself if you need it, and do not publish: there is no claim to be had now."""

    reason: Text


Answer = Hit | Granted | Waiting | Unclaimed
Resolution = Hit | Granted | Unclaimed


class Acquired(_Message, frozen=True, tag=68):
    """Answers an `Acquire`, one result a key."""

    term: U64
    session: U64
    request: U64
    results: list[Answer]


class Resolved(_Message, frozen=True, tag=69):
    """Ends the wait of single keys of an earlier acquire: pairs of position in that request and result. Pushed."""

    term: U64
    session: U64
    request: U64
    results: list[tuple[int, Resolution]]


class Renewed(_Message, frozen=True, tag=70):
    """Answers a `Renew`: the tokens that are live claims no longer; the others run for `claim_ms` again."""

    term: U64
    session: U64
    request: U64
    claim_ms: Milliseconds
    lost: list[U64]


class CommitStatus(enum.IntEnum):
    """What became of a commitment."""

    STORED = 1
    DUPLICATE = 2
    """The directory had it already."""
    OUTDATED = 3
    """Its generation is over; the bytes are unreachable."""
    REFUSED = 4
    """The directory is full, the name is being removed or was just now, or the generation is from the future."""


class Committed(_Message, frozen=True, tag=71):
    """Answers a `Commit`, one status an entry."""

    term: U64
    session: U64
    request: U64
    results: list[CommitStatus]


class Found(_Message, frozen=True, tag=72):
    """Answers a `Lookup`: a hit, or None where nothing is known."""

    term: U64
    session: U64
    request: U64
    results: list[Hit | None]


class Refused(_Message, frozen=True, tag=73):
    """A message was not understood or not accepted; `request` is 0 where it was not readable."""

    request: U64
    reason: Text


class Figures(_Message, frozen=True, tag=74):
    """Answers an `Inspect`: sizes of tables now, and counts since the controller's start, by name."""

    term: U64
    session: U64
    request: U64
    figures: Annotated[dict[Name, U64], msgspec.Meta(max_length=MAX_FIGURES)]


class Push(_Message, frozen=True, tag=75):
    """Invalidations, to be applied in their order by whoever has received all up to `after`.

    They are those of the numbers above `after` up to `through` that count: others among these are covered by later
    ones. Only where it is `whole` are all of those later ones here: what came before has been applied when this has.
    """

    term: U64
    session: U64
    after: U64
    through: U64
    whole: bool
    invalidations: Annotated[list[tuple[U64, Selector]], msgspec.Meta(max_length=MAX_PUSH)]


class Invalidated(_Message, frozen=True, tag=76):
    """Answers an `Invalidate`: its number, which is durable."""

    term: U64
    session: U64
    request: U64
    number: U64


class Awaited(_Part, frozen=True):
    """A session that may still serve what was invalidated, for `most_ms` more at most."""

    name: Name
    host: Text
    most_ms: Milliseconds


class Progress(_Message, frozen=True, tag=77):
    """Answers a `Follow`. `awaited` are some of the sessions that it waits for, and `waiting` is how many they are.

    `unbound` is how many sessions the guarantee excludes, since they serve what may be stale.
    """

    term: U64
    session: U64
    request: U64
    number: U64
    complete: bool
    waiting: U64
    unbound: U64
    awaited: list[Awaited]


class PinAnswer(_Message, frozen=True, tag=78):
    """Answers a `Pin`, or an `Unpin` with the ids that ended and nothing else.

    Args:
        refusal: why nothing was pinned; empty if it was. Then what follows holds, and is durable.
        ids: of the pins, in the order of the selectors.
        entries, nbytes: how many entries match now, and how large they are.
        left_ms: how long the first of the pins lasts from now.
    """

    term: U64
    session: U64
    request: U64
    refusal: Text
    ids: Annotated[list[U64], msgspec.Meta(max_length=2 * MAX_BATCH)]
    entries: U64
    nbytes: U64
    left_ms: PinMilliseconds


ControllerMessage = (
    Welcome
    | HelloAgain
    | HeartbeatAnswer
    | Acquired
    | Resolved
    | Renewed
    | Committed
    | Found
    | Refused
    | Figures
    | Push
    | Invalidated
    | Progress
    | PinAnswer
)

_Decoded = TypeVar("_Decoded")

_client_decoder = msgspec.msgpack.Decoder(ClientMessage)
_controller_decoder = msgspec.msgpack.Decoder(ControllerMessage)
_encoder = msgspec.msgpack.Encoder()


class MalformedMessage(ValueError):
    """A frame that is too large, no message, or a message with a field out of bounds."""


def encode(message: ClientMessage | ControllerMessage) -> bytes:
    """The frame of a message."""
    return _encoder.encode(message)


def _decode(decoder: msgspec.msgpack.Decoder[_Decoded], frame: bytes) -> _Decoded:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"a frame of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error


def decode_from_client(frame: bytes) -> ClientMessage:
    """The message in a frame that a client sent. Raises MalformedMessage."""
    return _decode(_client_decoder, frame)


def decode_from_controller(frame: bytes) -> ControllerMessage:
    """The message in a frame that the controller sent. Raises MalformedMessage."""
    return _decode(_controller_decoder, frame)
