"""Settings: one YAML file, then the environment, then arguments; the later wins, and nothing unknown is let through.

    store: {master: "10.0.0.5:50051", sidecar: "127.0.0.1:50052"}
    client: {pool_bytes: 2GiB, read_timeout: 500ms}

The file is the argument's or the one that `MMCACHE_CONFIG` names. `MMCACHE_CLIENT__READ_TIMEOUT=500ms` sets
`client.read_timeout`: two underscores, so that variables which Kubernetes makes of a service's name
(`MMCACHE_CONTROLLER_PORT`) are never taken for settings; with two, each is one of ours or refused. A value in the
environment is written as in the file.

Sizes are bytes (`67108864`) or carry a unit (`64MiB`, `1GB`: powers of 1024 and of 1000). Durations are seconds (`2`,
`0.5`) or carry a unit (`500ms`, `2s`, `5min`, `1h`); they are kept as float seconds. Whatever is wrong is refused with
the setting's full name and its file and line, or the variable's name.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec
import yaml

from mmcache.capacity_rules import Ages, Quotas
from mmcache.errors import ConfigError
from mmcache.setting_kinds import (
    BadValue,
    Choice,
    Count,
    CurveKey,
    Duration,
    Endpoint,
    Flag,
    Kind,
    Share,
    Size,
    Text,
    Url,
    Urls,
)

MAX_FILE_BYTES: Final = 1 << 20
"""A larger file is no configuration."""

CONFIG_VARIABLE: Final = "MMCACHE_CONFIG"
_PREFIX: Final = "MMCACHE_"
_LOW_WATERMARK: Final = 0.85


class _Incomplete(ConfigError):
    """Each value is possible in itself, but `setting` is of no use without another one."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting


_Made = TypeVar("_Made", bound="_Section")


class _Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the sections; checks and normalises however it is made. Raises ConfigError."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            try:
                msgspec.structs.force_setattr(self, name, kind.check(getattr(self, name)))
            except BadValue as error:
                raise ConfigError(f"{self.section}.{name} {error}") from error


class StoreSettings(_Section, frozen=True, kw_only=True):
    """Where the Mooncake Store is and how a process attaches to it."""

    section: ClassVar[str] = "store"

    master: Annotated[str, Endpoint()] = "127.0.0.1:50051"
    """`host:port` of mooncake_master's RPC."""
    metrics: Annotated[str | None, Endpoint(optional=True)] = None
    """`host:port` of its HTTP port, for `mmcache stats`, `mmcache doctor` and the controller."""
    sidecar: Annotated[str | None, Endpoint(optional=True)] = None
    """`host:port` of this node's `mooncake_client`, which shares memory with processes of its network namespace."""
    attach: Annotated[Literal["auto", "sidecar", "embedded"], Choice(words=("auto", "sidecar", "embedded"))] = "auto"
    """`auto`: the sidecar if its address is set and it answers, else embedded."""
    metadata: Annotated[str, Text(max_length=512)] = "P2PHANDSHAKE"
    """Mooncake's metadata service for transfers, or P2PHANDSHAKE for none."""
    protocol: Annotated[Literal["tcp", "rdma"], Choice(words=("tcp", "rdma"))] = "tcp"
    devices: Annotated[str, Text(max_length=512, empty=True)] = ""
    """RDMA devices, separated by commas; empty lets Mooncake choose."""
    hostname: Annotated[str, Text(max_length=253)] = "127.0.0.1"
    """The address under which other nodes reach this process (embedded)."""
    lease: Annotated[float, Duration()] = 10.0
    """The store's read lease in seconds: the master's `default_kv_lease_ttl`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attach == "sidecar" and self.sidecar is None:
            message = "store.attach is sidecar, but store.sidecar (its HOST:PORT) is not set"
            raise _Incomplete("store.attach", message)


class ControlSettings(_Section, frozen=True, kw_only=True):
    """Where clients reach the controller."""

    section: ClassVar[str] = "control"

    address: Annotated[str, Endpoint(scheme="tcp://")] = "tcp://127.0.0.1:7710"
    admin: Annotated[str | None, Url(optional=True)] = None
    """URL of its admin API, for commands that ask it. None: what `controller.admin` says here."""
    token_file: Annotated[str | None, Text(optional=True, max_length=4096)] = None
    """File with a token for it, which nobody else may read. MMCACHE_TOKEN, a token, goes before it."""
    controller_key: Annotated[str | None, CurveKey(optional=True)] = None
    """The controller's public key (`mmcache keys new`), 40 characters. None: the connection is not secured."""
    secret_key_file: Annotated[str | None, Text(optional=True, max_length=4096)] = None
    """File of this client's own secret key, which nobody else may read; the controller must know the public one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _both_or_none(self, ("controller_key", "the controller's public key"), ("secret_key_file", "this client's own"))


class ClientSettings(_Section, frozen=True, kw_only=True):
    """An engine's `MMCache`. Durations are seconds."""

    section: ClassVar[str] = "client"

    name: Annotated[str | None, Text(optional=True)] = None
    """A label for people; None: `host:pid`."""
    pool_bytes: Annotated[int, Size(least=1 << 16)] = 256 << 20
    """Memory registered with the store: blocks of reads and publications, and the local entries."""
    io_threads: Annotated[int, Count(most=256)] = 4
    connect_timeout: Annotated[float, Duration()] = 5.0
    read_timeout: Annotated[float, Duration()] = 2.0
    publish_timeout: Annotated[float, Duration()] = 5.0
    wait_timeout: Annotated[float, Duration(least=0.0)] = 30.0
    """How long `get_or_compute` waits for another's computation before it computes for itself; 0: it does not."""
    compute_timeout: Annotated[float, Duration()] = 120.0
    """How long a claim is renewed for a computation that has not ended."""
    verify: Annotated[Literal["full", "prefix"], Choice(words=("full", "prefix"))] = "full"
    """`full` checks the payload's checksum on every read, `prefix` only what describes it."""
    check_finite: Annotated[bool, Flag()] = False
    """Refuse to publish floating-point values that are not finite."""
    strict: Annotated[bool, Flag()] = False
    """Raise what would be a miss or a drop."""
    on_stale: Annotated[Literal["miss", "serve"], Choice(words=("miss", "serve"))] = "miss"
    """Without a fresh session, `miss`; or `serve` by what it knew last: then no invalidation waits for this client, and
    what it returns may be stale."""
    local_entries: Annotated[bool, Flag()] = True
    """Keep entries that were read or published in the pool, while it has room."""
    tell_uses: Annotated[bool, Flag()] = True
    """Tell the controller what was read, for it to keep that. Off for what reads entries only to copy or check them."""


class ControllerSettings(_Section, frozen=True, kw_only=True):
    """The controller. Durations are seconds."""

    section: ClassVar[str] = "controller"

    bind: Annotated[str, Endpoint(scheme="tcp://", lowest_port=0)] = "tcp://127.0.0.1:7710"
    """Port 0 takes a free one."""
    secret_key_file: Annotated[str | None, Text(optional=True, max_length=4096)] = None
    """File of the controller's secret key (`mmcache keys new`), which nobody else may read. None: connections are not
    secured, and whoever reaches the port may speak to the controller."""
    client_keys_file: Annotated[str | None, Text(optional=True, max_length=4096)] = None
    """File of the public keys of clients that may connect, one a line; read again when it changes."""
    session_ttl: Annotated[float, Duration(least=0.1, most=3600.0)] = 5.0
    """A client that could not renew its session for so long serves nothing."""
    claim_timeout: Annotated[float, Duration(least=0.1, most=3600.0)] = 10.0
    """A claim that is not renewed for so long passes on."""
    state: Annotated[str | None, Text(optional=True, max_length=4096)] = None
    """File of what outlives the controller: lineage, invalidations, audit. On a local file system, in a directory that
    exists. None: nothing does, and each start makes all entries from before unreachable."""
    admin: Annotated[str | None, Endpoint(optional=True, lowest_port=0)] = None
    """`host:port` of the admin API (HTTP); port 0 takes a free one. None: there is none."""
    admin_tokens: Annotated[str | None, Text(optional=True, max_length=4096)] = None
    """File of who may use it, and as what: see docs/operations.md. Also MMCACHE_ADMIN_TOKENS. Without both, anybody who
    reaches it may do all, and so it must be on loopback."""
    admin_open: Annotated[bool, Flag()] = False
    """Let it be reached from elsewhere without tokens."""
    reaper: Annotated[bool, Flag()] = True
    """Have a child process remove what was invalidated from the store (`store.master`); else its own eviction does."""
    reconcile_every: Annotated[float, Duration(least=1.0, most=86400.0)] = 60.0
    """How often that process lists what the store has (`store.metrics`), for the controller to forget what it lost."""
    eviction: Annotated[Literal["s3cost", "s3fifo", "lru"], Choice(words=("s3cost", "s3fifo", "lru"))] = "s3cost"
    """What goes when room is needed; see docs/capacity.md."""
    high_watermark: Annotated[float, Share()] = 0.9
    """Once so much of the store's capacity is used, entries are removed, until it is no more than `low_watermark`."""
    low_watermark: Annotated[float, Share()] = _LOW_WATERMARK
    quotas: Annotated[tuple[str, ...], Quotas()] = ()
    """Room that tenants and models are sure of, and may exceed while there is some that nobody needs: such as
    `tenant=acme 20GiB` or `model=qwen 30%`."""
    max_age: Annotated[tuple[str, ...], Ages()] = ()
    """When entries are removed whether there is room or not: such as `any 7d` or `tenant=acme,modality=video 1h`."""
    min_embeddings: Annotated[int, Count(least=0)] = 0
    """Entries of fewer embeddings, which are the rows of the first tensor, are not published."""
    max_bytes: Annotated[int | None, Size(optional=True)] = None
    """Nor are larger ones, in the store's bytes."""
    pinned_share: Annotated[float, Share(least=0.0)] = 0.25
    """How much of the store's capacity `mmcache pin` may keep from eviction."""
    max_entries: Annotated[int, Count()] = 2_000_000
    max_sessions: Annotated[int, Count(most=1_000_000)] = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        _both_or_none(
            self, ("secret_key_file", "the controller's own"), ("client_keys_file", "the public keys of its clients")
        )
        if self.low_watermark > self.high_watermark:
            low, high = f"{self.low_watermark:g}", f"{self.high_watermark:g}"
            message = f"controller.low_watermark is {low}, and must not be above controller.high_watermark, {high}"
            given = "low" if self.low_watermark != _LOW_WATERMARK else "high"
            raise _Incomplete(f"controller.{given}_watermark", message)


def _both_or_none(section: _Section, one: tuple[str, str], other: tuple[str, str]) -> None:
    """Two settings that are of use only together, each with what it is."""
    for (given, _), (missing, what) in ((one, other), (other, one)):
        if getattr(section, given) is not None and getattr(section, missing) is None:
            there, lacking = f"{section.section}.{given}", f"{section.section}.{missing}"
            raise _Incomplete(there, f"{there} is set, but {lacking} ({what}) is not; `mmcache keys new` makes keys")


class EnginesSettings(_Section, frozen=True, kw_only=True):
    """Engines whose own caches can be cleared with an invalidation."""

    section: ClassVar[str] = "engines"

    urls: Annotated[tuple[str, ...], Urls()] = ()
    """`http://HOST:PORT` of each, such as `vllm serve` has it."""
    token_file: Annotated[str | None, Text(optional=True, max_length=4096)] = None
    """File with a token that all of them are sent (`Authorization: Bearer`), and which nobody else may read."""
    timeout: Annotated[float, Duration(least=0.1, most=3600.0)] = 30.0
    """For all that is asked of one, in seconds."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings, checked and immutable."""

    store: StoreSettings = msgspec.field(default_factory=StoreSettings)
    control: ControlSettings = msgspec.field(default_factory=ControlSettings)
    client: ClientSettings = msgspec.field(default_factory=ClientSettings)
    controller: ControllerSettings = msgspec.field(default_factory=ControllerSettings)
    engines: EnginesSettings = msgspec.field(default_factory=EnginesSettings)


_SECTIONS: Final = tuple(Settings.__struct_fields__)


@functools.cache
def _kinds(section: type[_Section]) -> dict[str, Kind]:
    hints = get_type_hints(section, include_extras=True)
    return {name: hints[name].__metadata__[0] for name in section.__struct_fields__}


@functools.cache
def _kinds_by_name() -> dict[str, Kind]:
    sections = (StoreSettings, ControlSettings, ClientSettings, ControllerSettings, EnginesSettings)
    return {f"{section.section}.{name}": kind for section in sections for name, kind in _kinds(section).items()}


class _Assignment(NamedTuple):
    """One setting as found; `where` is its place for messages, `in_environment` tells that the value is text."""

    name: str
    value: object
    where: str
    in_environment: bool = False


def load(
    path: str | Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    overridden_by: str = "argument",
) -> Settings:
    """The settings of a file, the environment and arguments, in rising precedence.

    Args:
        path: the YAML file; None: the one that `MMCACHE_CONFIG` names, or none.
        environ: None: `os.environ`.
        overrides: by dotted name, such as `{"client.read_timeout": 1.0}`.
        overridden_by: where those come from, for messages.

    Raises:
        ConfigError: a setting is unknown, given twice, ill-typed or out of bounds, or the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    named_by = ""
    if path is None and (path := environ.get(CONFIG_VARIABLE) or None):
        named_by = f" ({CONFIG_VARIABLE})"
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    places: dict[str, str] = {}
    for assignments in (
        () if path is None else _from_file(Path(path), named_by),
        _from_environment(environ),
        (_Assignment(name, value, overridden_by) for name, value in (overrides or {}).items()),
    ):
        for name, value, where in _checked(assignments):
            section, _, setting = name.partition(".")
            values[section][setting] = value
            places[name] = where
    return Settings(
        store=_made(StoreSettings, values["store"], places),
        control=_made(ControlSettings, values["control"], places),
        client=_made(ClientSettings, values["client"], places),
        controller=_made(ControllerSettings, values["controller"], places),
        engines=_made(EnginesSettings, values["engines"], places),
    )


def _made(section: type[_Made], values: dict[str, Any], places: Mapping[str, str]) -> _Made:
    try:
        return section(**values)
    except _Incomplete as error:
        raise ConfigError(f"{places[error.setting]}: {error}") from error


def _checked(assignments: Iterable[_Assignment]) -> Iterator[tuple[str, object, str]]:
    """Name, normalised value and place of each."""
    for name, value, where, in_environment in assignments:
        kind = _kinds_by_name().get(name)
        if kind is None:
            raise ConfigError(f"{where}: unknown setting {name}{_did_you_mean(name)}")
        try:
            yield name, kind.check_text(str(value)) if in_environment else kind.check(value), where
        except BadValue as error:
            raise ConfigError(f"{where}: {name} {error}") from error


def _did_you_mean(name: str) -> str:
    section, _, setting = name[:128].rpartition(".")
    known = [full.split(".") for full in _kinds_by_name()]
    matches = [f"{home}.{one}" for home, one in known if one == setting]  # its section is wrong, or was left out
    if not matches and not section:
        matches = _close(setting, _SECTIONS)
    elif not matches:
        for near in _close(section, _SECTIONS):
            matches = [f"{near}.{one}" for one in _close(setting, [one for home, one in known if home == near])]
    return f"; did you mean {matches[0]}?" if matches else ""


def _close(word: str, words: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.7)


def _setting_of(variable: str) -> str | None:
    """The dotted name of the setting that a variable is for, known or not; None: it is not ours."""
    section, separator, setting = variable.removeprefix(_PREFIX).partition("__")
    if not variable.startswith(_PREFIX) or not separator:
        return None
    return f"{section}.{setting}".lower()


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Assignment]:
    for variable in sorted(environ):
        name = _setting_of(variable)
        if name is not None:
            yield _Assignment(name, environ[variable], f"environment variable {variable}", in_environment=True)


def _from_file(path: Path, named_by: str) -> Iterator[_Assignment]:
    root = _compose(path, named_by)
    for section, settings, where in _entries(path, root, prefix=""):
        if section not in _SECTIONS:
            raise ConfigError(f"{where}: unknown setting {section}{_did_you_mean(section)}")
        for name, node, line in _entries(path, settings, prefix=f"{section}."):
            yield _Assignment(name, _plain_value(node, f"{line}: {name}"), line)


def _compose(path: Path, named_by: str) -> yaml.Node | None:
    """The file's YAML nodes, which know their lines; None: it is empty."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}{named_by}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES:,} bytes")
    try:
        return yaml.compose(data.decode(), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        detail = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path}: not YAML: {detail}") from error


def _entries(path: Path, node: yaml.Node | None, *, prefix: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """Full name, value and place of each entry of a mapping; null, or nothing at all, is an empty one."""
    if node is None or node.tag == "tag:yaml.org,2002:null":
        return
    if not isinstance(node, yaml.MappingNode):
        what = prefix.rstrip(".") or "the file"
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: {what} must be a mapping of settings")
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{path}:{line}: the name of a setting must be text")
        name = f"{prefix}{key.value}"
        if name in lines:
            raise ConfigError(f"{path}:{line}: {name} is given twice, first in line {lines[name]}")
        lines[name] = line
        yield name, value, f"{path}:{line}"


def _plain_value(node: yaml.Node, what: str) -> object:
    """A scalar, or a list of scalars."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain_value(one, what) if isinstance(one, yaml.ScalarNode) else one for one in node.value]
    if not isinstance(node, yaml.ScalarNode):
        return node  # no kind takes it
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{what} is no plain value: {node.value[:80]!r}") from error


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a child whose settings are all in the file that it is given."""
    return {name: value for name, value in environ.items() if name != CONFIG_VARIABLE and _setting_of(name) is None}


def to_yaml(settings: Settings) -> str:
    """The text of a file that `load` reads as exactly these settings."""
    return yaml.safe_dump(msgspec.to_builtins(settings), sort_keys=False, allow_unicode=True)
