"""Puts together the two sides of an engine's connector from vLLM's configuration."""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver, collect_ec_item_metadata

from mmcache.agent.link import AgentLink
from mmcache.agent.staging import Staging
from mmcache.errors import StoreUnavailable
from mmcache.integrations.vllm.adapters import LoraDigests
from mmcache.integrations.vllm.describe import OURS, Describer
from mmcache.integrations.vllm.identity import EncoderIdentity, is_numbered
from mmcache.integrations.vllm.items import ItemTable
from mmcache.integrations.vllm.scheduler import SchedulerSide
from mmcache.integrations.vllm.settings import ConnectorSettings
from mmcache.integrations.vllm.widths import expected_widths
from mmcache.integrations.vllm.worker import WorkerSide

_log = logging.getLogger(__name__)

_MODALITIES = ("image", "video", "audio")


def make_worker_side(vllm_config: Any) -> WorkerSide:
    """A worker's side. Raises ConfigError for a setting that cannot be meant."""
    settings = ConnectorSettings.of(vllm_config.ec_transfer_config.ec_connector_extra_config)
    if vllm_config.parallel_config.rank == 0 and not _measured_in_one_order(vllm_config):
        _log.warning(
            "set PYTHONHASHSEED=0 in this engine's environment: without it, vLLM's workers may measure a producer's "
            "modalities each in another order, and the engine then does not start"
        )
    return WorkerSide(
        _staging_name(vllm_config),
        settings.staging_bytes,
        vllm_config.parallel_config.rank,
        vllm_config.device_config.device_type,
    )


def make_scheduler_side(vllm_config: Any) -> tuple[SchedulerSide, ItemReport]:
    """The scheduler's side, its agent started, and what its answers tell of items. Raises ConfigError."""
    engine = vllm_config.ec_transfer_config
    settings = ConnectorSettings.of(engine.ec_connector_extra_config)
    settings.load_config()  # the agent reads it too, but where it is wrong this engine must not start
    identity = EncoderIdentity.of(vllm_config, settings)
    identity.advise()
    resolver = PlaceholderMetadataResolver(vllm_config.model_config)
    for modality in _MODALITIES:  # now, for it makes a processor
        resolver.fields_for(modality)
    workers = _loading_workers(vllm_config)
    staging: Staging | None = None
    link: AgentLink | None = None
    try:
        staging = Staging.open_as_scheduler(_staging_name(vllm_config), settings.staging_bytes)
        if not _reports_arrive(vllm_config):
            _log.error(
                "this engine uses no embedding cache: with pipeline parallelism, and for pooling models, vLLM's V1 "
                "model runner does not tell the scheduler what its workers have copied. Its V2 model runner does "
                "(VLLM_USE_V2_MODEL_RUNNER=1)"
            )
            staging.close()
            staging = None
    except StoreUnavailable as error:
        _log.error("this engine uses no embedding cache: %s", error)
    counters: Counter[str] = Counter()
    table = ItemTable(
        settings.staging_bytes,
        is_fresh=staging.is_fresh if staging is not None else lambda _: False,
        loads=engine.is_ec_consumer,
        saves=engine.is_ec_producer,
        fetch_s=settings.fetch_timeout,
        wait_s=settings.wait_timeout,
        counters=counters,
    )
    describe = Describer(
        identity,
        loras=LoraDigests(),
        widths=functools.cache(functools.partial(expected_widths, vllm_config, settings)),
        itemsize=vllm_config.model_config.dtype.itemsize,
        metadata_fields=resolver.fields_for,
        tenant=settings.tenant,
        counters=counters,
    )
    if staging is not None:
        link = AgentLink(staging, settings.config, f"vllm:{engine.engine_id[:36]}")
        if not link.start(settings.connect_timeout):
            _log.warning("the embedding cache does not serve yet; this engine encodes for itself until it does")
    scheduler = SchedulerSide(
        staging=staging,
        link=link,
        table=table,
        describe=describe,
        can_encode=describe.can_encode,
        workers=workers,
        reports=_reports(vllm_config, workers),
    )
    return scheduler, ItemReport(identity, resolver)


class ItemReport:
    """What an answer of a producer's tells of its items, in vLLM's own format: a consumer need not transform pixels."""

    def __init__(self, identity: EncoderIdentity, resolver: PlaceholderMetadataResolver) -> None:
        self._identity = identity
        self._ours = {"model": identity.model, "version": identity.version}
        self._resolver = resolver

    def of(self, request: Any) -> dict[str, Any] | None:
        """By identifier; None for a request without items that mean the same to another engine."""
        items = collect_ec_item_metadata(request.mm_features, self._resolver)
        for feature in request.mm_features:
            if is_numbered(self._identity, feature):
                items.pop(feature.identifier, None)
        for item in items.values():
            item[OURS] = self._ours
        return dict(items) or None


def _staging_name(vllm_config: Any) -> str:
    """The same in all processes of one engine, and in no others.

    Engines that are data-parallel have one `engine_id`, and those of dense models are all of `data_parallel_rank` 0.
    """
    return f"{vllm_config.ec_transfer_config.engine_id}/{vllm_config.parallel_config.data_parallel_index}"


def _measured_in_one_order(vllm_config: Any) -> bool:
    """Whether all workers have one order of modalities when vLLM has them encode one of each, before it starts.

    Of vLLM 0.32: it goes through a set of their names (`tower_modalities` in vllm/multimodal/encoder_budget.py), whose
    order is that of a process's hash seed, and the encoder's collective operations then do not belong together.
    """
    alone = vllm_config.parallel_config.tensor_parallel_size == 1 or not vllm_config.ec_transfer_config.is_ec_producer
    forked = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork") == "fork"  # with its parent's hash seed
    return alone or forked or os.environ.get("PYTHONHASHSEED", "random") != "random"


def _reports_arrive(vllm_config: Any) -> bool:
    """Whether what workers report after a step reaches the scheduler. Else no block would ever be free again."""
    if getattr(vllm_config, "use_v2_model_runner", False):
        return True
    stages = vllm_config.parallel_config.pipeline_parallel_size
    return bool(stages == 1 and vllm_config.model_config.runner_type != "pooling")


def _reports(vllm_config: Any, workers: int) -> int:
    if not vllm_config.ec_transfer_config.is_ec_consumer:
        return 0
    return workers if vllm_config.parallel_config.distributed_executor_backend == "mp" else 1


def _loading_workers(vllm_config: Any) -> int:
    """How many workers load: those of the first pipeline stage, which have the first ranks."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1))
