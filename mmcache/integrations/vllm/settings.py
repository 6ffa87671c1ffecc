"""The connector's own settings: `ec_connector_extra_config` in vLLM's `--ec-transfer-config`.

    --ec-transfer-config '{"ec_connector": "MMCacheECConnector", "ec_role": "ec_both",
                           "ec_connector_extra_config": {"config": "/etc/mmcache.yaml", "staging_bytes": "512MiB"}}'

Values are written as in mmcache's configuration file: sizes and durations are numbers, or text with a unit. Nothing
unknown is let through. Where the store and the controller are is said by that file (`mmcache.config`), not here.
"""

from __future__ import annotations

import difflib
import functools
import mmap
from collections.abc import Mapping
from typing import Annotated, Final, get_type_hints

import msgspec

from mmcache.config import Settings, load
from mmcache.errors import ConfigError
from mmcache.setting_kinds import BadValue, Count, Duration, Kind, Size, Text, show

PREFIX: Final = "ec_connector_extra_config"
SALT_MARK: Final = "~"
"""Stands in the tenants that a `cache_salt` makes, and so in no configured one."""


class KeyText(Text, frozen=True):
    """Text that can be a field of a key: printable ASCII without spaces."""

    without: str = ""

    def _check(self, value: object) -> str:
        text = super()._check(value)
        if not text.isascii() or " " in text:
            raise BadValue(f"must be printable ASCII without spaces, not {show(text)}")
        if self.without and self.without in text:
            raise BadValue(f"must not hold {self.without!r}")
        return text


class Pages(Size, frozen=True):
    """Bytes in whole pages: rounded up."""

    def _check(self, value: object) -> int:
        return -(-super()._check(value) // mmap.PAGESIZE) * mmap.PAGESIZE


class Widths(Kind, frozen=True):
    """One width for all modalities, or a mapping from modality to width; kept as a mapping, `*` being all others."""

    def _check(self, value: object) -> dict[str, int]:
        if not isinstance(value, Mapping):
            return {"*": _width.check(value)}
        widths = {}
        for modality, width in value.items():
            if not isinstance(modality, str) or not modality:
                raise BadValue("must be a width, or a mapping from modality to width")
            try:
                widths[modality] = _width.check(width)
            except BadValue as error:
                raise BadValue(f"for {modality[:32]!r} {error}") from error
        return widths


class _Width(Count, frozen=True):
    def check(self, value: object) -> int:
        return self._check(value)


_width: Final = _Width(most=1 << 20)


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, checked and normalised however it is made. Durations are seconds.

    Raises:
        ConfigError: a value that a setting cannot hold; the message names it in full.
    """

    config: Annotated[str | None, Text(optional=True, max_length=4096)] = None
    """Path of mmcache's configuration file; None: the one that `MMCACHE_CONFIG` names, or defaults."""
    model: Annotated[str | None, KeyText(optional=True, max_length=256)] = None
    """The model's name in keys; None: what the engine was given as `--model`. vLLM hashes that into its own
    identifiers too, so engines that are to share embeddings need the same `--model` all the same."""
    model_version: Annotated[str | None, Text(optional=True)] = None
    """Stands for the weights and the files of the processor, which then are not read. Give it a new value with each
    change of them; engines that are to share embeddings need the same."""
    tenant: Annotated[str, KeyText(max_length=64, without=SALT_MARK)] = "default"
    """Entries are never shared between tenants. A request's `cache_salt` makes a tenant of its own below this one."""
    staging_bytes: Annotated[int, Pages(least=1 << 20)] = 256 << 20
    """Shared memory in /dev/shm through which embeddings go to and from the engine's workers, in whole pages."""
    fetch_timeout: Annotated[float, Duration(most=600.0)] = 2.0
    """How long a request is deferred for the read of an embedding that another engine has published."""
    wait_timeout: Annotated[float, Duration(least=0.0, most=3600.0)] = 30.0
    """How long it is deferred while another engine encodes the same item; 0: not at all, it is encoded here too."""
    connect_timeout: Annotated[float, Duration(most=600.0)] = 5.0
    """How long the engine's start may take longer until store and controller answer; without them it starts anyway."""
    embedding_width: Annotated[dict[str, int] | None, Widths(optional=True)] = None
    """Second dimension of the encoder's output, as one number or by modality; None: derived from the model."""

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            try:
                msgspec.structs.force_setattr(self, name, kind.check(getattr(self, name)))
            except BadValue as error:
                raise ConfigError(f"{PREFIX}.{name} {error}") from error

    @classmethod
    def of(cls, extra_config: Mapping[str, object] | None) -> ConnectorSettings:
        """The settings of an engine's `ec_connector_extra_config`.

        Raises:
            ConfigError: a setting is unknown, ill-typed or out of bounds; the message names it in full.
        """
        if extra_config is None:
            return cls()
        if not isinstance(extra_config, Mapping):
            raise ConfigError(f"{PREFIX} must be a mapping of settings, not {show(extra_config)}")
        for name in extra_config:
            if name not in _kinds():
                raise ConfigError(f"{PREFIX}: unknown setting {str(name)[:128]}{_did_you_mean(str(name)[:128])}")
        return cls(**extra_config)  # type: ignore[arg-type]  # checked one by one on construction

    def load_config(self, environ: Mapping[str, str] | None = None) -> Settings:
        """What mmcache's configuration file and the environment (None: `os.environ`) say.

        Raises:
            ConfigError: the file is missing or wrong; the message names it.
        """
        try:
            return load(self.config, environ=environ)
        except ConfigError as error:
            if self.config is None:  # then the message says that `MMCACHE_CONFIG` named the file
                raise
            raise ConfigError(f"{PREFIX}.config: {error}") from error

    def width_of(self, modality: str) -> int | None:
        """The configured width of a modality's embeddings; None: to be derived."""
        widths = self.embedding_width or {}
        return widths.get(modality, widths.get("*"))


@functools.cache
def _kinds() -> dict[str, Kind]:
    hints = get_type_hints(ConnectorSettings, include_extras=True)
    return {name: hints[name].__metadata__[0] for name in ConnectorSettings.__struct_fields__}


def _did_you_mean(name: str) -> str:
    """The setting that was meant; or, for one of the configuration file's, that it belongs there."""
    if near := difflib.get_close_matches(name, _kinds(), n=1, cutoff=0.7):
        return f"; did you mean {near[0]}?"
    section, _, setting = name.rpartition(".")
    for home in Settings.__struct_fields__:
        fields = getattr(Settings(), home).__struct_fields__
        if name == home or (setting in fields and section in ("", home)):
            return f"; settings of the {home} belong in mmcache's configuration file, which `config` names"
    return ""
