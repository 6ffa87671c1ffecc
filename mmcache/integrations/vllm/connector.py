"""vLLM's connector of the shared cache: `--ec-transfer-config '{"ec_connector": "MMCacheECConnector", ...}'`.

vLLM makes one in each worker, and then one in the scheduler, which also starts the agent. All hooks run on the main
thread of an engine's process, and one that raises ends the engine. So what fails in a hook is logged, counted, and
costs one encoding here; only settings that cannot be meant raise, when the engine starts.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import vllm
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)

from mmcache.integrations.vllm import assembly
from mmcache.integrations.vllm.statistics import MMCacheECPromMetrics, MMCacheECStats
from mmcache.integrations.vllm.versions import check_role, check_version
from mmcache.integrations.vllm.worker import Report, Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass
class StepMetadata(ECConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """From the scheduler to the workers, with each step."""

    step: Step


@dataclass
class StepReport(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler, after a step with copies."""

    report: Report

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        """Both workers' together."""
        return StepReport(self.report.merged(other.report))


def _nothing(*_: Any, **__: Any) -> None:
    """What a hook without a result returns."""


def _without_cache(connector: MMCacheECConnector, request: Request, *_: Any, **__: Any) -> bool:
    """Whether a request can be scheduled without a cache. Else it fails by itself, and not in the encoder."""
    return connector._scheduler.available_without(request)


def _survives(default: Callable[..., Any]) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """A hook whose faults are ours, and must not be the engine's: then it returns what `default` makes of the call."""

    def decorate(hook: Callable[..., _Result]) -> Callable[..., _Result]:
        @functools.wraps(hook)
        def survive(self: MMCacheECConnector, *arguments: Any, **named: Any) -> _Result:
            try:
                return hook(self, *arguments, **named)
            except Exception as error:  # noqa: BLE001 - counted, logged: it must not end the engine
                self.faults[hook.__name__] += 1
                number = self.faults.total()
                if number & (number - 1) == 0:  # the 1st, 2nd, 4th, 8th, …
                    text = "a fault of the embedding cache in %s (number %d)"
                    _log.error(text, hook.__name__, number, exc_info=error)
                return cast("_Result", default(self, *arguments, **named))

        return survive

    return decorate


class MMCacheECConnector(ECConnectorBase):  # type: ignore[misc]
    """Shares encoder outputs between engines through mmcache. See docs/vllm.md for its settings.

    Raises:
        ConfigError: a setting in `ec_connector_extra_config`, or in the configuration file that it names, is wrong.
        UnsupportedEngine: this version of vLLM has not been tried with this version of mmcache.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        check_version(vllm.__version__)
        check_role(vllm_config.ec_transfer_config.ec_role)
        self.faults: Counter[str] = Counter()
        """By hook: how often it failed, which the engine survived."""
        self._told: Counter[str] = Counter()
        if role is ECConnectorRole.WORKER:
            self._worker = assembly.make_worker_side(vllm_config)
        else:
            self._scheduler, self._items = assembly.make_scheduler_side(vllm_config)

    @_survives(_nothing)
    def shutdown(self) -> None:
        """End the agent, unmap the memory."""
        if self.role is ECConnectorRole.WORKER:
            self._worker.close()
        else:
            self._scheduler.close()

    # Worker side

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(connector_metadata.step)

    @_survives(_nothing)
    def start_save_caches(self, **kwargs: Any) -> None:
        """Save what others wait for and the engine holds already."""
        if (encoder_cache := kwargs.get("encoder_cache")) is not None:
            self._worker.save_resident(encoder_cache)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: Any) -> None:
        """Load what the scheduler's side has promised."""
        self._worker.load(encoder_cache)

    @_survives(_nothing)
    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: Any) -> None:
        """Save what was encoded, on a producer, if it is to be published."""
        if self.is_producer:
            self._worker.save(encoder_cache, mm_hash)

    @_survives(_nothing)
    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        """The step's copies are done."""
        report = self._worker.end()
        return StepReport(report) if report is not None else None

    # Scheduler side

    @_survives(_without_cache)
    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Defer a request whose embeddings are on their way here or are being encoded by another engine."""
        return self._scheduler.ensure_available(request, num_computed_tokens)

    @_survives(lambda *_, **__: False)
    def has_cache_item(self, identifier: str) -> bool:
        """Whether an item's bytes are here, verified."""
        return self._scheduler.has(identifier)

    @_survives(_nothing)
    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """The engine makes room for an item."""
        self._scheduler.allocated(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        """What the workers copy in this step."""
        return StepMetadata(self._build_step(scheduler_output))

    @_survives(lambda *_, **__: Step(0, (), ()))
    def _build_step(self, scheduler_output: SchedulerOutput) -> Step:
        return self._scheduler.build_step(
            freed=scheduler_output.free_encoder_mm_hashes,
            reaches_workers=scheduler_output.total_num_scheduled_tokens > 0,
        )

    @_survives(_nothing)
    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        """A step has returned from the workers."""
        meta = connector_output.ec_connector_worker_meta
        if isinstance(meta, StepReport):
            self._scheduler.step_returned(meta.report)

    @_survives(lambda *_, **__: (False, None))
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Give up what the request wanted; a producer's answer tells what the items are."""
        self._scheduler.request_finished(request.request_id)
        return False, self._items.of(request) if self.is_producer else None

    @_survives(lambda *_, **__: set())
    def take_unavailable_requests(self) -> set[str]:
        """Requests for items that nobody has and this engine cannot encode."""
        return self._scheduler.take_unavailable()

    @_survives(_nothing)
    def get_ec_connector_stats(self) -> MMCacheECStats | None:
        """What was counted since the last call, on the scheduler's side; the workers count nothing."""
        if self.role is ECConnectorRole.WORKER:
            return None
        counts = self._scheduler.take_counts()
        if self.faults != self._told:
            counts |= {f"fault.{hook}": count for hook, count in (self.faults - self._told).items()}
            self._told = self.faults.copy()
        return MMCacheECStats.of(counts) if counts else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> MMCacheECStats | None:
        """The statistics that another process sent."""
        return MMCacheECStats(data=data) if data is not None else MMCacheECStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MMCacheECPromMetrics:
        """Prometheus metrics of the engine's `/metrics`."""
        return MMCacheECPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
