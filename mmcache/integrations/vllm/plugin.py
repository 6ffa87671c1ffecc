"""The entry point through which vLLM finds the connector (`vllm.general_plugins`): called in each of its processes."""

from __future__ import annotations

import functools
import logging
from typing import Final

CONNECTOR: Final = "MMCacheECConnector"
MODULE: Final = "mmcache.integrations.vllm.connector"

_log = logging.getLogger(__name__)


@functools.cache
def register() -> None:
    """Make `"ec_connector": "MMCacheECConnector"` known to vLLM, once in a process. Never raises.

    Only names are registered: the connector is imported in engines that use it.
    """
    try:
        share_log()
        from vllm.distributed.ec_transfer.ec_connector import factory  # noqa: PLC0415 - in a process of vLLM's

        factory.ECConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    except ImportError as error:
        _log.warning("this vLLM has no encoder-cache connectors that mmcache could join: %s", error)
    except Exception as error:  # noqa: BLE001 - an engine that does not use the connector must start all the same
        _log.warning("mmcache's connector could not be registered with vLLM: %s", error)


def share_log() -> None:
    """Have mmcache's log written as vLLM's is, at its level, unless somebody has configured it otherwise.

    vLLM configures its own loggers only, and more than once: so ours is put below it, for whatever it does next.
    """
    ours = logging.getLogger("mmcache")
    if not ours.handlers and ours.level == logging.NOTSET:
        ours.parent = logging.getLogger("vllm")
        ours.setLevel(logging.NOTSET)  # which forgets what was worked out from the parent before
