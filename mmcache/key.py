"""What an embedding is called: keys, their scope, and the names under which the store keeps them.

A key names everything that changes an encoder's output. Fields are bounded and checked on construction and nothing is
ever cut. The store's name is a function of key, generation and the controller's lineage:

    mmc1.<lineage>.<digest of scope>.<digest of mm_hash>.<generation>         whole digests, only [a-z0-9.]

Digests are BLAKE2b-256 over typed, length-framed fields, so a dot, or one field ending where the next begins, cannot
make two keys meet.
"""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Final

import msgspec

from mmcache.errors import InvalidKey

DIGEST_BYTES: Final = 32
MM_HASH_MAX_BYTES: Final = 1024
"""An mm_hash is any Unicode of at most this many bytes in UTF-8."""

_FIELD_LIMITS: Final = {"model": 256, "version": 128, "lora": 128, "modality": 32, "tenant": 64}
"""Longest value of each field in characters; a field holds printable ASCII without spaces."""
_LINEAGE: Final = re.compile(r"[a-z0-9]{1,32}\Z")
_mm_hasher: Final = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"mmc1.mm_hash")
_fingerprint_encoder = msgspec.msgpack.Encoder(order="deterministic")  # not JSON: there NaN is null and bytes are str


def check_field(name: str, value: object) -> None:
    """Raise InvalidKey unless `value` may be the field `name`, which is not mm_hash."""
    if type(value) is not str:  # a subclass may compare as it likes, and is not written to messages
        raise InvalidKey(f"{name} must be a str, not {type(value).__name__}")
    limit = _FIELD_LIMITS[name]
    if not value:
        raise InvalidKey(f"{name} must not be empty")
    if len(value) > limit:
        raise InvalidKey(f"{name} has {len(value)} characters; at most {limit} are allowed")
    if not (value.isascii() and value.isprintable()) or " " in value:
        raise InvalidKey(f"{name} may hold printable ASCII without spaces only, got {value!r}")


def check_mm_hash(value: object) -> bytes:
    """An mm_hash in UTF-8. Raises InvalidKey for what cannot be one."""
    if type(value) is not str:
        raise InvalidKey(f"mm_hash must be a str, not {type(value).__name__}")
    if not value:
        raise InvalidKey("mm_hash must not be empty")
    if len(value) > MM_HASH_MAX_BYTES:  # before encoding, so that a huge one costs nothing
        raise InvalidKey(f"mm_hash has {len(value)} characters; at most {MM_HASH_MAX_BYTES} bytes of UTF-8 are allowed")
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise InvalidKey("mm_hash has a lone surrogate and cannot be written in UTF-8") from error
    if len(encoded) > MM_HASH_MAX_BYTES:
        raise InvalidKey(f"mm_hash has {len(encoded)} bytes of UTF-8; at most {MM_HASH_MAX_BYTES} are allowed")
    return encoded


class Scope(msgspec.Struct, frozen=True, array_like=True, cache_hash=True, forbid_unknown_fields=True):
    """All of a key but its mm_hash: what entries of one encoder, adapter, modality and tenant share."""

    tenant: str
    model: str
    version: str
    lora: str | None
    modality: str

    def __post_init__(self) -> None:
        for name in ("tenant", "model", "version", "modality"):
            check_field(name, getattr(self, name))
        if self.lora is not None:
            check_field("lora", self.lora)

    @property
    def digest(self) -> bytes:
        """The scope's 32-byte digest."""
        return _scope_digest(self)


class EmbeddingKey(msgspec.Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True):
    """Names one embedding: immutable, hashable, checked on construction.

    Args:
        model: the encoder, such as `google/siglip-base-patch16-224`.
        version: its weights and all else that changes the output; `EncoderFingerprint(...).version` makes one.
        mm_hash: the item's content digest, or an identifier that the engine vouches for; any Unicode of at most
            1,024 bytes in UTF-8. `mmcache.hashing` makes one from content.
        lora: None when no adapter touches the encoder, else a digest of the adapter's content, never its name.
        modality: `image`, `video`, `audio`, …
        tenant: entries are never shared between tenants.

    Raises:
        InvalidKey: a field is empty, too long or outside its alphabet; the message names it.
    """

    model: str
    version: str
    mm_hash: str
    lora: str | None = None
    modality: str = "image"
    tenant: str = "default"

    def __post_init__(self) -> None:
        for name in ("model", "version", "modality", "tenant"):
            check_field(name, getattr(self, name))
        if self.lora is not None:
            check_field("lora", self.lora)
        check_mm_hash(self.mm_hash)

    @property
    def scope(self) -> Scope:
        """The key without its mm_hash."""
        return _scope(self.tenant, self.model, self.version, self.lora, self.modality)

    @property
    def mm_digest(self) -> bytes:
        """The 32-byte digest of the mm_hash."""
        return mm_digest(self.mm_hash)


class EncoderFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Folds all that changes an encoder's output into a key's `version`.

    Args:
        weights: digest or revision of the checkpoint.
        dtype: the computation's dtype, such as `bfloat16`.
        quantization: the scheme, or None.
        processor: the preprocessor's configuration, as plain JSON-like data or its digest.
        extra: anything else that changes the output (attention backend where it matters, merge size, …).

    Raises:
        InvalidKey: a part is not the str that it must be; or, from `version`, not plain data.
    """

    weights: str
    dtype: str
    quantization: str | None = None
    processor: object = None
    extra: object = None

    def __post_init__(self) -> None:
        for name in ("weights", "dtype", "quantization"):
            value = getattr(self, name)
            if type(value) is not str and not (value is None and name == "quantization"):
                raise InvalidKey(f"EncoderFingerprint: {name} must be a str, not {type(value).__name__}")

    @property
    def version(self) -> str:
        """`f1-` and 64 hex digits; equal for equal fingerprints in every process."""
        try:
            parts = [
                _fingerprint_encoder.encode(part)
                for part in (self.weights, self.dtype, self.quantization, self.processor, self.extra)
            ]
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidKey(f"EncoderFingerprint takes plain data only: {error}") from error
        return "f1-" + _framed_digest(b"mmc1.encoder", *parts).hex()


@functools.lru_cache(maxsize=1024)
def _scope(tenant: str, model: str, version: str, lora: str | None, modality: str) -> Scope:
    return Scope(tenant, model, version, lora, modality)


def _framed_digest(purpose: bytes, *parts: bytes) -> bytes:
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=purpose)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()


@functools.lru_cache(maxsize=1024)
def _scope_digest(scope: Scope) -> bytes:
    lora = b"0" if scope.lora is None else b"1" + scope.lora.encode()
    return _framed_digest(
        b"mmc1.scope",
        scope.tenant.encode(),
        scope.model.encode(),
        scope.version.encode(),
        lora,
        scope.modality.encode(),
    )


def mm_digest(mm_hash: str) -> bytes:
    """The 32-byte digest that stands for an mm_hash in names and messages."""
    hasher = _mm_hasher.copy()  # which costs less than to make one
    hasher.update(mm_hash.encode())
    return hasher.digest()


@functools.lru_cache(maxsize=1024)
def _name_stem(lineage: str, scope: Scope) -> str:
    if not _LINEAGE.match(lineage):
        raise InvalidKey(f"lineage must be 1 to 32 of [a-z0-9], got {lineage!r}")
    return f"mmc1.{lineage}.{scope.digest.hex()}."


def store_name(key: EmbeddingKey, *, lineage: str, generation: int) -> str:
    """The name under which the store keeps `key` at `generation`, in the world of the controller with `lineage`."""
    if generation < 0:
        raise InvalidKey(f"generation must be from 0 up, got {generation}")
    return f"{_name_stem(lineage, key.scope)}{key.mm_digest.hex()}.{generation}"


def store_names(lineage: str) -> re.Pattern[bytes]:
    """Finds the store's names of a lineage, one a line: both digests in hexadecimal, and the generation, are groups."""
    if not _LINEAGE.match(lineage):
        raise InvalidKey(f"lineage must be 1 to 32 of [a-z0-9], got {lineage!r}")
    digest = b"([0-9a-f]{%d})" % (2 * DIGEST_BYTES)
    return re.compile(rb"^mmc1\.%b\.%b\.%b\.(0|[1-9][0-9]{0,18})$" % (lineage.encode(), digest, digest), re.MULTILINE)


def store_name_of(digests: bytes, *, lineage: str, generation: int) -> str:
    """The same name from the 64 bytes of a scope's digest and that of an mm_hash."""
    return f"mmc1.{lineage}.{digests[:DIGEST_BYTES].hex()}.{digests[DIGEST_BYTES:].hex()}.{generation}"
