from __future__ import annotations

import pytest

from mmcache.errors import ConfigError, MMCacheError
from mmcache.integrations.vllm.versions import ROLES, UnsupportedEngine, check_role, check_version


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.32.0+cpu", "0.32.7rc1", "0.33.0", "0.33.1.dev12+g1234abc", "0.33", "v0.32.0", "0.32rc1"]
)
def test_the_supported_versions_are_accepted_in_all_their_builds(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize(
    "version", ["0.31.9", "0.34.0", "1.32.0", "0.3.2", "0.320.0", "0.330", "dev", "", "0", None, 32, "0." * 5000]
)
def test_any_other_version_is_refused_with_what_to_do(version: object) -> None:
    with pytest.raises(UnsupportedEngine, match=r"supports vLLM 0\.32 and 0\.33; installed is .*pip install") as caught:
        check_version(version)
    assert len(str(caught.value)) < 400
    assert isinstance(caught.value, MMCacheError)
    assert isinstance(caught.value, ImportError)


def test_the_refusal_names_what_is_installed() -> None:
    with pytest.raises(UnsupportedEngine, match=r"installed is '0\.9\.1'"):
        check_version("0.9.1")


def test_an_unknown_role_is_refused() -> None:
    for role in ROLES:
        check_role(role)
    for unknown in ("producer", None, 7, "x" * 1000):
        with pytest.raises(ConfigError, match=r"ec_role must be ec_producer, ec_consumer or ec_both, not") as caught:
            check_role(unknown)
        assert len(str(caught.value)) < 300
