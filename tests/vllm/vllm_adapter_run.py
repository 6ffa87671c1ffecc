"""Drives vLLM's own adapter of its second model runner (`ActiveECConnector`) on both sides of our connector.

`python vllm_adapter_run.py MODEL CONFIG SOURCES`, where SOURCES is a folder with the sources of another vLLM, whose
encoder-cache modules then stand in for those that are installed, or `-`. Prints one JSON object: what happened.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

STAND_INS = (
    "vllm.distributed.ec_transfer.ec_connector.base",
    "vllm.distributed.ec_transfer.ec_connector.factory",
    "vllm.distributed.ec_transfer.ec_connector.metrics",
    "vllm.distributed.ec_transfer.ec_connector.utils",
    "vllm.distributed.ec_transfer.ec_transfer_state",
    "vllm.v1.worker.ec_connector_model_runner_mixin",
    "vllm.v1.worker.gpu.ec_connector",
)
PATIENCE_S = 120.0
ROWS = 4


class StandIns(importlib.abc.MetaPathFinder):
    """Finds the modules of `STAND_INS` in another folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.found: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in STAND_INS:
            return None
        self.found.append(name)
        return importlib.util.spec_from_file_location(name, self._folder / f"{name.replace('.', '/')}.py")


class Engine:
    """What vLLM's scheduler and its second model runner do to a connector, step by step, in one process."""

    def __init__(self, model: str, extra: dict[str, Any]) -> None:
        from vllm.distributed.ec_transfer import ec_transfer_state
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.worker.gpu.ec_connector import ActiveECConnector

        config = EngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            ec_transfer_config={
                "ec_connector": "MMCacheECConnector",
                "ec_connector_module_path": "mmcache.integrations.vllm.connector",
                "ec_role": "ec_both",
                "ec_connector_extra_config": extra,
            },
        ).create_engine_config()
        ec_transfer_state.ensure_ec_transfer_initialized(config)
        self.cache: dict[str, Any] = {}
        self.adapter = ActiveECConnector(config, self.cache)
        self.scheduler = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
        self.encoded: list[str] = []
        self.freed: list[str] = []
        self.counts: dict[str, float] = {}

    def step(self, request: Any, encode: Callable[[str], Any]) -> bool:
        """One step with one request; False if it was deferred."""
        from vllm.v1.core.sched.output import SchedulerOutput

        output = SchedulerOutput.make_empty()
        output.free_encoder_mm_hashes, self.freed = self.freed, []
        for identifier in output.free_encoder_mm_hashes:
            self.cache.pop(identifier, None)
        to_encode: list[str] = []
        runs = request is not None and self.scheduler.ensure_cache_available(request, 0)
        if runs:
            for index, feature in enumerate(request.mm_features):
                if feature.identifier not in self.cache and feature.identifier not in to_encode:
                    if not self.scheduler.has_cache_item(feature.identifier):
                        to_encode.append(feature.identifier)
                    self.scheduler.update_state_after_alloc(request, index)
            output.num_scheduled_tokens[request.request_id] = output.total_num_scheduled_tokens = 8
        output.ec_connector_metadata = self.scheduler.build_connector_meta(output)
        if runs:
            with self.adapter.maybe_get_output(output) as ec_output:
                for identifier in to_encode:
                    self.cache[identifier] = encode(identifier)
                missing = [one.identifier for one in request.mm_features if one.identifier not in self.cache]
                assert not missing, f"promised and not there: {missing}"
        else:
            ec_output = self.adapter.no_forward(output).ec_connector_output
        self.encoded += to_encode
        if ec_output is not None:
            self.scheduler.update_connector_output(ec_output)
        if (stats := self.scheduler.get_ec_connector_stats()) is not None:
            for name, value in stats.data.items():
                if not isinstance(value, list):
                    self.counts[name] = self.counts.get(name, 0) + value
        return bool(runs)

    def serve(self, request: Any, encode: Callable[[str], Any]) -> Any:
        """Step until the request has run; what it tells when it has finished."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.step(request, encode):
            assert time.monotonic() < deadline, "deferred for ever"
        return self.scheduler.request_finished(request)

    def step_until(self, name: str, least: float) -> None:
        """Empty steps until something was counted."""
        deadline = time.monotonic() + PATIENCE_S
        while sum(value for key, value in self.counts.items() if key.split(".")[0] == name) < least:
            assert time.monotonic() < deadline, f"no {name}: {self.counts}"
            self.step(None, lambda _: None)


def request_of(name: str, *identifiers: str) -> Any:
    """A real request with items of real classes."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
    from vllm.v1.request import Request

    features = [
        MultiModalFeatureSpec(
            data=MultiModalKwargsItem.dummy(),
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=1 + 8 * number, length=ROWS),
        )
        for number, identifier in enumerate(identifiers)
    ]
    return Request(name, list(range(64)), SamplingParams(max_tokens=1), None, mm_features=features)


def differences() -> list[str]:
    """Where our connector does not fit the base class: what is abstract, and parameters of methods."""
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    from mmcache.integrations.vllm.connector import MMCacheECConnector

    found = [f"{name} is abstract" for name in sorted(MMCacheECConnector.__abstractmethods__)]
    for name, ours in vars(MMCacheECConnector).items():
        theirs = getattr(ECConnectorBase, name, None)
        if name.startswith("_") or theirs is None:
            continue
        takes = inspect.signature(ours.__func__ if isinstance(ours, classmethod) else ours).parameters
        wanted = inspect.signature(theirs.__func__ if inspect.ismethod(theirs) else theirs).parameters
        named = [one for one in wanted.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
        mine = [one for one in takes.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
        if [one.name for one in named] != [one.name for one in mine][: len(named)]:
            found.append(f"{name}({', '.join(takes)}) where there is {name}({', '.join(wanted)})")
        if any(one.kind is one.VAR_KEYWORD for one in wanted.values()) != any(
            one.kind is one.VAR_KEYWORD for one in takes.values()
        ):
            found.append(f"{name} does not take the same named arguments")
    public = {name for name in vars(MMCacheECConnector) if not name.startswith("_")}
    ours_alone = sorted(name for name in public if callable(getattr(MMCacheECConnector, name)))
    return found + [f"{name} is no hook of vLLM's" for name in ours_alone if not hasattr(ECConnectorBase, name)]


def main() -> None:
    import vllm

    model, extra, sources = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    stand_ins = StandIns(Path(sources))
    if sources != "-":
        sys.meta_path.insert(0, stand_ins)
        vllm.__version__ = Path(sources).name.removeprefix("vllm-")
    import torch

    torch.manual_seed(0)
    made = {}

    def encode(identifier: str) -> torch.Tensor:
        made[identifier] = torch.rand(ROWS, 64)
        return made[identifier]

    engine = Engine(model, extra)
    told = engine.serve(request_of("first", "one", "two", "one"), encode)
    engine.step_until("published", 2)
    encoded = list(engine.encoded)
    engine.freed = list(engine.cache)
    engine.step(None, encode)  # vLLM, too, tells of what it freed at the end of a step
    engine.serve(request_of("second", "two", "one"), encode)
    loaded = {name: bool(torch.equal(engine.cache[name], made[name])) for name in ("one", "two")}
    engine.serve(request_of("third", "one", "three"), encode)
    engine.step_until("published", 3)
    engine.scheduler.shutdown()
    engine.adapter.ec_connector.shutdown()
    print(
        json.dumps(
            {
                "version": vllm.__version__,
                "stand_ins": sorted(set(stand_ins.found)),
                "encoded_first": encoded,
                "encoded_in_all": engine.encoded,
                "loaded": loaded,
                "told": told,
                "counts": engine.counts,
                "differences": differences(),
                "faults": [str(one.faults) for one in (engine.scheduler, engine.adapter.ec_connector) if one.faults],
            }
        )
    )


if __name__ == "__main__":
    main()
