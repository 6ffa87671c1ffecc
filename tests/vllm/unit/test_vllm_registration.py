from __future__ import annotations

import logging

import pytest
import vllm
from vllm.config import ECTransferConfig
from vllm.config.logging import LoggingConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.logger import configure_logging

from mmcache.integrations.vllm.plugin import CONNECTOR, MODULE, register
from mmcache.integrations.vllm.versions import check_version


def test_the_installed_vllm_is_a_supported_one() -> None:
    check_version(vllm.__version__)


def test_vllm_finds_the_connector_by_its_name_however_often_it_is_registered(caplog: pytest.LogCaptureFixture) -> None:
    register()
    register()
    config = ECTransferConfig(ec_connector=CONNECTOR, ec_role="ec_both")
    found = ECConnectorFactory.get_connector_class(config)
    assert issubclass(found, ECConnectorBase)
    assert (found.__module__, found.__name__) == (MODULE, CONNECTOR)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_and_without_the_plugin_by_its_module() -> None:
    config = ECTransferConfig(ec_connector="MMCacheECConnector", ec_connector_module_path=MODULE, ec_role="ec_both")
    assert ECConnectorFactory.get_connector_class(config).__name__ == CONNECTOR


def test_our_log_is_written_as_vllm_s_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    register()
    configure_logging(LoggingConfig())
    logging.getLogger(f"{MODULE}.something").info("told by mmcache")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "told by mmcache" in line]
    assert "INFO" in line
    assert "test_vllm_registration.py" in line


def test_an_unknown_role_is_refused_by_vllm() -> None:
    for role in ("ec_neither", "producer", None):
        with pytest.raises(ValueError, match="ec_role"):
            ECTransferConfig(ec_connector=CONNECTOR, ec_role=role)  # type: ignore[arg-type]
