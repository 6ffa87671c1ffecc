"""End to end with a real vLLM on the CPU: `make test-vllm`. Where vLLM is not installed, nothing of it is collected."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TIMEOUT_S = 1200
"""Engines take their time to start, the more so beside other work."""

_vllm = importlib.util.find_spec("vllm")
collect_ignore_glob = [] if _vllm is not None and _vllm.origin is not None else ["*"]  # this folder has its name, too

pytest.register_assert_rewrite("vllm_caches")
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(FOLDER))

if TYPE_CHECKING:
    from vllm_engines import LocalEngine

    from benchmarks.parts import Parts

Model = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More time than the other tests have."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The folder of a model of some kind and seed, built when it is first asked for."""
    folder = tmp_path_factory.mktemp("models")

    def build(kind: str, seed: int = 0) -> str:
        path = folder / f"{kind}-{seed}"
        if not path.exists():
            command = [sys.executable, "-m", "benchmarks.vllm_models", kind, str(path), "--seed", str(seed)]
            subprocess.run(command, cwd=ROOT, check=True)
        return str(path)

    return build


@pytest.fixture(scope="session")
def cluster() -> Iterator[Parts]:
    """A whole cluster, for tests that break nothing, with deadlines that only a fault lets pass."""
    from vllm_caches import PATIENT_CLIENT

    from benchmarks.parts import Parts

    with Parts(owner_bytes=256 << 20, client=PATIENT_CLIENT) as parts:
        yield parts


@pytest.fixture(scope="session")
def plain(model: Model) -> Iterator[LocalEngine]:
    """An engine without any connector, which says what is right; in float32, where no order of work changes a token."""
    from vllm_caches import EXACT
    from vllm_engines import LocalEngine, Options, started

    engine = LocalEngine(Options(model("vision"), arguments={**EXACT, "max_model_len": 4096}), name="plain")
    with started(engine):
        yield engine


@pytest.fixture(scope="session")
def both(model: Model, cluster: Parts) -> Iterator[list[LocalEngine]]:
    """Two engines that encode and load, for tests that break neither."""
    from vllm_caches import options
    from vllm_engines import LocalEngine, started

    made = options(model("vision"), cluster.config, "ec_both")
    engines = [LocalEngine(made, name=f"both-{number}") for number in range(2)]
    with started(*engines):
        yield engines


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """For what one test starts."""
    with contextlib.ExitStack() as entered:
        yield entered


def pytest_make_parametrize_id(val: Any) -> str | None:
    """Lists of words are their own names."""
    return val if isinstance(val, str) else None
