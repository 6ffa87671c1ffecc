"""The connector's figures, in vLLM's log and on its `/metrics`.

Counts travel from the scheduler's process to the ones that log them as one flat mapping: `name`, or `name.word` where a
word (a reason, a status) tells more, as `mmcache.metrics.Counters` has them; lists are single observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from mmcache.metrics import OTHER

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_WORDS: Final = 64
"""Most words of one metric that are told apart; the rest is counted as `other`."""
MAX_OBSERVATIONS: Final = 1024
"""Most observations of one kind that are sent at once; more are dropped."""


class Metric(NamedTuple):
    """A counter of `/metrics`: there its name ends in `_total`. `label` is what its word says, `scale` its unit."""

    name: str
    label: str
    text: str
    scale: float = 1.0


COUNTERS: Final = {
    "hit": Metric("vllm:mmcache_ec_hits", "source", "Embeddings that were loaded instead of encoded."),
    "miss": Metric("vllm:mmcache_ec_misses", "reason", "Items that were not to be had, by reason, and encoded here."),
    "not_shared": Metric("vllm:mmcache_ec_not_shared", "reason", "Items without a key to share them under, by reason."),
    "granted": Metric("vllm:mmcache_ec_granted", "", "Items that this engine was asked to encode, for all."),
    "wait": Metric("vllm:mmcache_ec_waits", "", "Items that another engine was encoding already."),
    "published": Metric("vllm:mmcache_ec_published", "status", "Items encoded here, by what became of them."),
    "loaded_bytes": Metric("vllm:mmcache_ec_loaded_bytes", "", "Bytes of embeddings loaded."),
    "published_bytes": Metric("vllm:mmcache_ec_published_bytes", "", "Bytes of embeddings published."),
    "deferred_ms": Metric("vllm:mmcache_ec_deferred_seconds", "", "Seconds that requests were deferred.", 0.001),
    "mismatch": Metric("vllm:mmcache_ec_mismatches", "what", "Requests from an encoder that shares nothing with us."),
    "fault": Metric("vllm:mmcache_ec_faults", "hook", "Faults of the connector that the engine survived."),
}
EVENTS: Final = Metric("vllm:mmcache_ec_events", "event", "Anything else that the connector counts, by name.")
LOAD_SECONDS: Final = "load_s"
HISTOGRAMS: Final = {
    LOAD_SECONDS: Metric("vllm:mmcache_ec_load_seconds", "", "Seconds from the first ask for an item until it is here.")
}
BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

Figure = float | list[float]


class MMCacheECStats(ECConnectorStats):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Counts and observations of one interval."""

    data: dict[str, Figure]

    @classmethod
    def of(cls, figures: Mapping[str, Figure]) -> MMCacheECStats:
        """What was counted; zeros are left out."""
        return cls(data={name: _bounded(figure) for name, figure in figures.items() if figure})

    def reset(self) -> None:
        """Start a new interval."""
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> MMCacheECStats:
        """Both together, as a new one: others may hold these two."""
        total = dict(self.data)
        for name, figure in other.data.items():
            earlier = total.get(name)
            if earlier is None:
                total[name] = figure
            elif isinstance(figure, list) and isinstance(earlier, list):
                total[name] = _bounded(earlier + figure)
            elif not isinstance(figure, list) and not isinstance(earlier, list):
                total[name] = earlier + figure
        return MMCacheECStats(data=total)

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: how many hits and misses, then all counts by name, and observations as count and mean."""
        line: dict[str, int | float] = {}
        sums: dict[str, float] = {"hit": 0, "miss": 0}
        for name, figure in sorted(self.data.items()):
            if isinstance(figure, list):
                line[f"{name}.count"] = len(figure)
                line[f"{name}.mean"] = round(sum(figure) / len(figure), 4) if figure else 0.0
                continue
            family, _, word = name.partition(".")
            if family in sums:
                sums[family] += figure
            if word or family not in sums:
                line[name] = figure
        return {**sums, **line}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class MMCacheECPromMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus metrics, one child for each engine (and word)."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {}
        self._children: dict[tuple[str, int, str], Any] = {}
        self._words: dict[str, set[str]] = {}
        for name, metric in {**COUNTERS, "": EVENTS}.items():
            labels = [*labelnames, metric.label] if metric.label else labelnames
            self._counters[name] = self._counter_cls(name=metric.name, documentation=metric.text, labelnames=labels)
            if not metric.label:  # these show as 0 before the first event
                for engine in per_engine_labelvalues:
                    self._child(name, engine, "")
        self._histograms = {
            name: create_metric_per_engine(
                self._histogram_cls(
                    name=metric.name, documentation=metric.text, labelnames=labelnames, buckets=list(BUCKETS)
                ),
                per_engine_labelvalues,
            )
            for name, metric in HISTOGRAMS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine counted."""
        for name, figure in transfer_stats_data.items():
            if isinstance(figure, list):
                if (histogram := self._histograms.get(name)) is not None and engine_idx in histogram:
                    for observation in figure:
                        histogram[engine_idx].observe(observation)
                continue
            family, _, word = name.partition(".")
            if family not in COUNTERS:
                family, word = "", name
            metric = COUNTERS.get(family, EVENTS)
            child = self._child(family, engine_idx, self._known(family, word or "none") if metric.label else "")
            if child is not None and figure > 0:
                child.inc(figure * metric.scale)

    def _known(self, family: str, word: str) -> str:
        """The word, unless there are too many of them already."""
        words = self._words.setdefault(family, set())
        if word not in words and len(words) >= MAX_WORDS:
            return OTHER
        words.add(word)
        return word

    def _child(self, family: str, engine: int, word: str) -> Any:
        """The metric with its labels; None for an engine that is not this process's."""
        child = self._children.get((family, engine, word))
        if child is None and engine in self.per_engine_labelvalues:
            values = [*self.per_engine_labelvalues[engine], *([word] if word else [])]
            child = self._children[family, engine, word] = self._counters[family].labels(*values)
        return child


def _bounded(figure: Figure) -> Figure:
    return figure[:MAX_OBSERVATIONS] if isinstance(figure, list) else figure
