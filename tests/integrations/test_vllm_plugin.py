from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import pytest

from mmcache.integrations.vllm import plugin

FACTORY = "vllm.distributed.ec_transfer.ec_connector.factory"


class Factory:
    """vLLM's `ECConnectorFactory`, as far as a plugin sees it."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_connector(self, name: str, module: str, connector: str) -> None:
        if name in self._registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        self._registry[name] = (module, connector)


@pytest.fixture
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """Ours and vLLM's, as they are before either is configured."""
    ours, theirs = logging.getLogger("mmcache"), logging.getLogger("vllm")
    before = [
        (logger, logger.level, logger.propagate, list(logger.handlers), logger.parent) for logger in (ours, theirs)
    ]
    for logger in (ours, theirs):
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
    yield ours, theirs
    for logger, level, propagate, handlers, parent in before:
        logger.parent = parent
        logger.propagate = propagate
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch, loggers: object) -> Factory:
    plugin.register.cache_clear()
    made = Factory()
    parts = FACTORY.split(".")
    modules: dict[str, Any] = {".".join(parts[:end]): ModuleType(parts[end - 1]) for end in range(1, len(parts) + 1)}
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    modules[FACTORY].ECConnectorFactory = made
    modules[FACTORY.rpartition(".")[0]].factory = modules[FACTORY]
    return made


def test_vllm_is_told_the_connector_s_name_once(factory: Factory, caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    plugin.register()
    assert factory._registry == {"MMCacheECConnector": ("mmcache.integrations.vllm.connector", "MMCacheECConnector")}
    assert not caplog.records


@pytest.mark.parametrize("missing", ["vllm.distributed.ec_transfer", "vllm"])
def test_an_engine_without_such_connectors_starts_all_the_same(
    factory: Factory, missing: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name == missing or name.startswith(f"{missing}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    plugin.register()
    assert "no encoder-cache connectors" in caplog.text


def test_an_engine_that_refuses_the_connector_starts_all_the_same(
    factory: Factory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Factory, "register_connector", lambda *_: 1 // 0)
    plugin.register()
    assert "could not be registered" in caplog.text


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_our_log_goes_where_vllm_s_goes_however_late_that_is_configured(
    loggers: tuple[logging.Logger, logging.Logger],
) -> None:
    _, theirs = loggers
    log, kept = logging.getLogger("mmcache.integrations.vllm.identity"), Kept()
    theirs.setLevel(logging.INFO)
    assert not log.isEnabledFor(logging.INFO)
    plugin.share_log()
    plugin.share_log()
    theirs.addHandler(kept)
    theirs.propagate = False
    log.info("told")
    log.debug("not told")
    assert kept.lines == ["told"]


@pytest.mark.parametrize("configure", [lambda log: log.setLevel(logging.DEBUG), lambda log: log.addHandler(Kept())])
def test_a_log_that_somebody_has_configured_is_left_alone(
    loggers: tuple[logging.Logger, logging.Logger], configure: Callable[[logging.Logger], object]
) -> None:
    ours, theirs = loggers
    configure(ours)
    plugin.share_log()
    assert ours.parent is not theirs


def test_the_entry_point_leads_to_the_plugin() -> None:
    (entry,) = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "mmcache"]
    assert entry.value == "mmcache.integrations.vllm.plugin:register"
    assert entry.load() is plugin.register
