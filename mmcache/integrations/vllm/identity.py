"""What embeddings are called: keys out of an engine's configuration and its requests.

The version in a key is a fingerprint of all that changes an encoder's output for the same item, and of nothing else, so
that an encoder's and a prefill engine's agree:

    in it      the checkpoint's content (`checkpoint.py`) or `model_version`, dtype, quantisation, `hf_overrides`,
               `mm_processor_kwargs`, `media_io_kwargs`, the processor's files, video pruning, FP8 attention
    not in it  parallelism, limits, lengths, cache sizes, roles; which device or kernel computes the same thing: the
               attention backend, where media are decoded, processed and normalised (vLLM itself chooses these
               otherwise in an engine that only encodes)

What a request says of itself (`mm_processor_kwargs`, …) vLLM hashes into the item's identifier.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import hashlib
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from mmcache.errors import InvalidKey
from mmcache.integrations.vllm.adapters import NoDigest
from mmcache.integrations.vllm.checkpoint import Files, read_files
from mmcache.integrations.vllm.settings import SALT_MARK, ConnectorSettings
from mmcache.integrations.vllm.snapshots import cached_snapshot
from mmcache.key import MM_HASH_MAX_BYTES, EmbeddingKey, EncoderFingerprint

_log = logging.getLogger(__name__)

REQUEST_LOCAL: Final = "request_local"
"""The reason for refusing an identifier that another item has too, in another engine or after a restart."""
MAX_SALT_CHARACTERS: Final = 4096
_ROOM_BESIDE_SALT: Final = 64 - len(SALT_MARK) - 43
_LOCAL: Final = re.compile(r"renderer-?[0-9]{1,20}-mm-[0-9]{1,20}-[!-~]{1,64}-[0-9]{1,20}")
"""vLLM's own numbers, `renderer{process}-mm-{request}-{modality}-{item}`, which each engine counts from 0."""
_DIGEST: Final = re.compile(r"(?:[0-9a-f]{64}|[0-9a-f]{128})")
_PROCESSOR_PLACES: Final = frozenset({"device"})
_MEDIA_PLACES: Final = frozenset({"device", "backend"})
"""Arguments that say where, or by which library, the same thing is done."""
_MAX_DEPTH: Final = 12


class Feature(Protocol):
    """What is used of vLLM's `MultiModalFeatureSpec`."""

    modality: str
    identifier: str
    mm_hash: str | None


class RequestKey(NamedTuple):
    """The key of an item of a request; or None and the reason, in a word, why it cannot be shared."""

    key: EmbeddingKey | None
    reason: str = ""


class EncoderIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What all keys of one engine have in common.

    Args:
        model, version: as in its keys.
        dtype: of its embeddings, such as `bfloat16`.
        tower_lora: whether adapters change its encoder's output.
        lora_options: what it makes of an adapter, besides its content.
        local_identifiers: whether its renderer numbers items instead of hashing them.
        parts: what the version was made of, for people.
    """

    model: str
    version: str
    dtype: str
    tower_lora: bool = False
    lora_options: str = ""
    local_identifiers: bool = False
    parts: dict[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, vllm_config: Any, settings: ConnectorSettings) -> EncoderIdentity:
        """The identity of an engine's encoder; reads bounded parts of its checkpoint, unless `model_version` is set."""
        model_config = vllm_config.model_config
        name = settings.model or getattr(model_config, "model_weights", "") or model_config.model
        dtype = _dtype_name(model_config.dtype)
        weights, files = _weights(vllm_config, settings, name)
        fingerprint = EncoderFingerprint(
            weights=weights,
            dtype=dtype,
            quantization=_scheme(model_config.quantization),
            processor=_processor(model_config, files),
            extra=_extra(model_config),
        )
        lora_config = getattr(vllm_config, "lora_config", None)
        return cls(
            model=_field(str(name), 256),
            version=fingerprint.version,
            dtype=dtype,
            tower_lora=bool(getattr(lora_config, "enable_tower_connector_lora", False)),
            lora_options=_lora_options(lora_config, dtype),
            local_identifiers=_local_identifiers(vllm_config),
            parts={
                "weights": weights[:80],
                "dtype": dtype,
                "quantization": str(fingerprint.quantization),
                "processor": _short(fingerprint.processor),
                "extra": _short(fingerprint.extra),
            },
        )

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value}" for name, value in self.parts.items())
        return f"model {self.model}, version {self.version} ({parts})"

    def advise(self) -> None:
        """Log who this is, for comparison with other engines' logs, and what keeps it from sharing."""
        _log.info("embeddings here are those of %s", self)
        if self.local_identifiers:
            _log.warning(
                "mm_processor_cache_gb is 0 and prefix caching is off, so vLLM numbers multimodal items instead of "
                "hashing them: another item has the same number elsewhere, so these are not shared. Set "
                "--mm-processor-cache-gb to a small size, or send a uuid with each item that is no bare SHA-256."
            )


def request_key(
    identity: EncoderIdentity,
    feature: Feature,
    *,
    lora_digest: str | NoDigest | None,
    cache_salt: str | None,
    tenant: str,
) -> RequestKey:
    """The key of one item of a request. Never raises, and takes no longer for a huge uuid.

    Args:
        identity: of the engine.
        feature: the item.
        lora_digest: `LoraDigests.digest` of the request's adapter, None if it has none.
        cache_salt: the request's: it shares nothing with requests of another.
        tenant: the connector's.
    """
    mm_hash = getattr(feature, "mm_hash", None)
    named = mm_hash or getattr(feature, "identifier", None)
    if type(named) is not str or not 0 < len(named) <= MM_HASH_MAX_BYTES:
        return RequestKey(None, "mm_hash")
    if is_numbered(identity, feature):
        return RequestKey(None, REQUEST_LOCAL)
    adapter = None
    if identity.tower_lora and lora_digest is not None:
        if not isinstance(lora_digest, str):
            return RequestKey(None, f"lora_{lora_digest.value}")
        adapter = _adapter_name(lora_digest, identity.lora_options)
    if cache_salt:
        if type(cache_salt) is not str or len(cache_salt) > MAX_SALT_CHARACTERS:
            return RequestKey(None, "cache_salt")
        tenant = _salted(tenant, cache_salt)
    modality = getattr(feature, "modality", "")
    try:
        return RequestKey(EmbeddingKey(identity.model, identity.version, named, adapter, modality, tenant))
    except InvalidKey:
        return RequestKey(None, "invalid")


def is_numbered(identity: EncoderIdentity, feature: Feature) -> bool:
    """Whether an item's name is a number that this engine gave it, which is another item's elsewhere.

    With arguments of the request's own vLLM hashes these together with the number: a digest, and as ambiguous.
    """
    mm_hash = getattr(feature, "mm_hash", None)
    named = mm_hash or feature.identifier
    bare = named if mm_hash or not identity.tower_lora else named.rpartition(":")[2]
    return bool(_LOCAL.fullmatch(bare) or (identity.local_identifiers and _DIGEST.fullmatch(bare)))


@functools.lru_cache(maxsize=1024)
def _salted(tenant: str, salt: str) -> str:
    """A tenant for each salt: a whole digest, behind the tenant's name where there is room for it."""
    hasher = hashlib.blake2b(digest_size=32, person=b"mmc1.ec.salt")
    for part in (tenant.encode(), salt.encode(errors="surrogatepass")):
        hasher.update(len(part).to_bytes(8, "big") + part)
    digest = base64.urlsafe_b64encode(hasher.digest()).decode().rstrip("=")
    return f"{tenant if len(tenant) <= _ROOM_BESIDE_SALT else ''}{SALT_MARK}{digest}"


@functools.lru_cache(maxsize=1024)
def _adapter_name(digest: str, options: str) -> str:
    return _hexdigest(b"mmc1.ec.adapter", digest, options) if options else digest


def _hexdigest(purpose: bytes, *parts: str) -> str:
    hasher = hashlib.blake2b(digest_size=32, person=purpose)
    for part in parts:
        encoded = part.encode(errors="surrogatepass")
        hasher.update(len(encoded).to_bytes(8, "big") + encoded)
    return hasher.hexdigest()


def _local_identifiers(vllm_config: Any) -> bool:
    """As vLLM decides it: `BaseRenderer._process_mm_uuids`."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    if multimodal is None or getattr(multimodal, "mm_processor_cache_gb", None) != 0:
        return False
    return not getattr(vllm_config.cache_config, "enable_prefix_caching", False)


def _weights(vllm_config: Any, settings: ConnectorSettings, name: object) -> tuple[str, Files | None]:
    """What stands for the weights, and the checkpoint's files, if they were read."""
    if settings.model_version is not None:
        return f"version:{settings.model_version}", None
    model_config = vllm_config.model_config
    load_config = getattr(vllm_config, "load_config", None)
    load_format = _word(getattr(load_config, "load_format", "auto"))
    files = None
    try:
        if (path := _checkpoint(model_config, load_config)) is not None:
            other = getattr(model_config, "hf_config_path", None)
            files = read_files(
                path,
                load_format=load_format,
                remote_code=bool(getattr(model_config, "trust_remote_code", False)),
                config=Path(other) if other and Path(other).is_dir() else None,
            )
    except OSError as error:
        _log.warning("the checkpoint of %s cannot be read: %s", name, error)
    config = files.config if files is not None else ""
    if load_format == "dummy":
        return f"dummy:{getattr(model_config, 'seed', 0)}:{config}", files
    if files is not None and files.weights is not None:
        return f"files:{files.weights}", files
    revision = getattr(model_config, "revision", None)
    _log.warning(
        "no weights of %s were found on this machine, so its embeddings go by its name, its revision (%s) and its "
        "configuration alone. If its weights ever change under these, set model_version in ec_connector_extra_config, "
        "and another one with each change.",
        name,
        revision,
    )
    return f"named:{_hexdigest(b'mmc1.ec.named', str(name), str(revision or ''), config)}", files


def _checkpoint(model_config: Any, load_config: Any) -> Path | None:
    """The directory or file of the checkpoint on this machine: as given, or the snapshot that was downloaded."""
    path = Path(model_config.model)
    if path.exists():
        return path
    return cached_snapshot(
        model_config.model,
        "config.json",
        revision=getattr(model_config, "revision", None),
        cache=getattr(load_config, "download_dir", None),
    )


def _processor(model_config: Any, files: Files | None) -> object:
    multimodal = getattr(model_config, "multimodal_config", None)
    arguments = dict(getattr(multimodal, "mm_processor_kwargs", None) or {})
    media = dict(getattr(multimodal, "media_io_kwargs", None) or {})
    return {
        "files": files.processor if files is not None else {},
        "arguments": _plain(_without(_PROCESSOR_PLACES, arguments)),
        "media": _plain(_without(_MEDIA_PLACES, media)),
    }


def _without(names: frozenset[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without some, on all levels, and without what is empty then."""
    kept = {
        name: _without(names, value) if isinstance(value, Mapping) else value
        for name, value in arguments.items()
        if name not in names
    }
    return {name: value for name, value in kept.items() if value != {}}


def _extra(model_config: Any) -> object:
    """What else changes the output. Only what is set is in it, so that a field that vLLM adds changes no version."""
    multimodal = getattr(model_config, "multimodal_config", None)
    other_config = getattr(model_config, "hf_config_path", None)
    extra = {
        "hf_config_path": _plain(other_config) if other_config and not Path(other_config).is_dir() else None,
        "hf_overrides": _plain(getattr(model_config, "hf_overrides", None)),
        "quantization_config": _plain(getattr(model_config, "quantization_config", None)),
        "model_class_overrides": _plain(getattr(model_config, "model_class_overrides", None)),
    }
    if getattr(model_config, "trust_remote_code", False):
        extra["code_revision"] = _plain(getattr(model_config, "code_revision", None))
    if rate := getattr(multimodal, "video_pruning_rate", None):
        extra["video_pruning"] = [_plain(rate), _plain(getattr(multimodal, "video_pruning_method", None))]
    if attention := getattr(multimodal, "mm_encoder_attn_dtype", None):
        scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
        extra["attention_dtype"] = [_plain(attention), _file_digest(scales) if scales else None]
    return {name: value for name, value in extra.items() if value}


def _file_digest(path: str) -> str:
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=32, person=b"mmc1.ec.text").hexdigest()
    except OSError as error:
        _log.warning("%s cannot be read: %s", path, error)
        return f"path:{path}"


def _lora_options(lora_config: Any, dtype: str) -> str:
    """The options that change what an adapter does to the encoder; empty where they are as usual."""
    options = []
    if modules := getattr(lora_config, "target_modules", None):
        options.append(f"modules {sorted(map(str, modules))}")
    if (own := _dtype_name(getattr(lora_config, "lora_dtype", None) or "auto")) not in ("auto", dtype):
        options.append(f"dtype {own}")
    return ", ".join(options)


def _field(value: str, limit: int) -> str:
    """A value as a key's field can hold it: itself where it can, else its digest."""
    if 0 < len(value) <= limit and value.isascii() and value.isprintable() and " " not in value:
        return value
    return f"{SALT_MARK}{_hexdigest(b'mmc1.ec.field', value)}"


def _scheme(quantization: object) -> str | None:
    """A quantisation's scheme, without vLLM's choice of a kernel for it (`awq_marlin`)."""
    return None if quantization is None else _word(quantization).removeprefix("auto_").removesuffix("_marlin")


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _word(value: object) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value)


def _short(part: object) -> str:
    """Enough of a part's digest for people to compare."""
    return hashlib.blake2b(msgspec.msgpack.encode(part, order="deterministic"), digest_size=6).hexdigest()


def _plain(value: Any, depth: int = 0) -> Any:
    """Configuration as plain data, the same in every process: never an address, and no order where none is meant."""
    if value is None or type(value) is bool or (type(value) is int and -(1 << 63) <= value < 1 << 64):
        return value
    if type(value) is str:
        return _writable(value)
    if type(value) is float and math.isfinite(value):
        return value
    if depth >= _MAX_DEPTH:
        return "…"
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {_writable(str(name)): _plain(one, depth + 1) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, depth + 1) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(one, depth + 1)) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: _plain(getattr(value, field.name, None), depth + 1) for field in dataclasses.fields(value)
        }
        return {name: one for name, one in fields.items() if one is not None}
    if isinstance(value, str | int | float | Path) or type(value).__module__ == "torch":
        return _writable(str(value))
    if callable(value) and isinstance(name := getattr(value, "__qualname__", None), str):
        return f"{value.__module__}:{name}"
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _writable(text: str) -> str:
    """Without lone surrogates, which UTF-8 does not have."""
    return text.encode(errors="backslashreplace").decode()
