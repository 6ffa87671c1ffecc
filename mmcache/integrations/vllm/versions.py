"""Which vLLM this connector is for: the interface of encoder-cache connectors changes with its minor versions."""

from __future__ import annotations

import re
from typing import Final

from mmcache.errors import ConfigError, MMCacheError

SUPPORTED: Final = ((0, 32), (0, 33))
"""Minor versions whose connector interface was tried."""
ROLES: Final = ("ec_producer", "ec_consumer", "ec_both")

_RELEASE: Final = re.compile(r"v?([0-9]{1,6})\.([0-9]{1,6})")


class UnsupportedEngine(MMCacheError, ImportError):
    """The installed vLLM is not one that this version of mmcache was tried with."""


def check_version(version: object) -> None:
    """Refuse any vLLM but the supported ones; a local part (`0.32.0+cpu`) or a pre-release of them is fine.

    Raises:
        UnsupportedEngine: what is supported, what is installed, and what to do.
    """
    match = _RELEASE.match(version) if isinstance(version, str) else None
    if match is not None and (int(match[1]), int(match[2])) in SUPPORTED:
        return
    supported = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    found = repr(version) if isinstance(version, str) and len(version) <= 80 else "of no readable version"
    raise UnsupportedEngine(
        f"mmcache's connector supports vLLM {supported}; installed is {found}. Install one of these (pip install "
        f'"vllm=={SUPPORTED[0][0]}.{SUPPORTED[0][1]}.*"), or a version of mmcache that supports yours, or start this '
        "engine without --ec-transfer-config."
    )


def check_role(role: object) -> None:
    """Refuse an `ec_role` that is none, as vLLM does where it reads it from the command line.

    Raises:
        ConfigError: naming the setting and the roles.
    """
    if role not in ROLES:
        raise ConfigError(
            f"ec_transfer_config.ec_role must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, not {role!r:.80}"
        )
