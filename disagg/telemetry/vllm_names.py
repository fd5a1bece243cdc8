"""Our metrics under the names that vLLM's have, for dashboards, autoscalers and gateways that know those.

A family here has no values of its own: at each scrape it is read off the one of ours that it is (`Same`), or off numbers that are
asked for then. Both names are in one answer, so whoever sums over everything that begins with "vllm:" counts nothing twice in a
process. What differs in meaning is in docs/operations.md, line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from disagg.messages.layout import GroupKind
from disagg.messages.legs import LoadReport


class Same(Struct, frozen=True):
    """vLLM's name, without what a counter's samples add to it, and the metric of ours. summed: over its labels, to one value.

    labels: of ours that have another name there; those not named are kept as they are.
    """

    name: str
    source: Collector
    summed: bool = False
    labels: Mapping[str, str] = {}


class Pool(Struct, frozen=True):
    """KV memory, as vLLM speaks of it. usage: 0 to 1, of what requests need; blocks: pages of block_tokens tokens."""

    usage: float
    block_tokens: int
    blocks: int


def blocks_of(load: LoadReport) -> int:
    """How many blocks a server's pool has room for, all data-parallel ranks together: pages in all layers that keep every token,
    or, of a model without such layers, in those that keep a window. 0 where the server does not say how its pool is cut."""
    memory = load.memory
    if memory is None:
        return 0
    cut = [(each.kind, memory.large_bytes // each.page_bytes) for each in memory.groups if each.page_bytes > 0]
    for kind in (GroupKind.FULL, GroupKind.WINDOW):
        # Each group takes large pages of its own, so many small pages from each.
        pages = [pages for name, pages in cut if name == kind and pages > 0]
        if pages:
            return int(load.pages_total / sum(Fraction(1, each) for each in pages))
    return 0


class VllmNames(Collector):
    """Registers itself. pool: None while there is none."""

    def __init__(
        self, registry: CollectorRegistry, model: str, same: Sequence[Same], pool: Callable[[], Pool | None]
    ) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._same = tuple(same)
        self._pool = pool
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names that are known beforehand are asked of it at once, before there is a pool."""
        return ()

    def collect(self) -> Iterator[Metric]:
        for each in self._same:
            yield self._renamed(each)
        pool = self._pool()
        if pool is not None:
            yield from self._of_pool(pool)

    def _renamed(self, same: Same) -> Metric:
        [source] = same.source.collect()
        made = Metric(same.name, f"{source.documentation} ({source.name})", source.type)
        sums: dict[str, float] = {}
        for sample in source.samples:
            suffix = sample.name.removeprefix(source.name)
            if suffix == "_created":
                continue
            if same.summed:
                sums[suffix] = sums.get(suffix, 0.0) + sample.value
            else:
                labels = {same.labels.get(name, name): value for name, value in sample.labels.items()}
                made.add_sample(same.name + suffix, {**self._labels, **labels}, sample.value)
        for suffix, value in sums.items():
            made.add_sample(same.name + suffix, self._labels, value)
        return made

    def _of_pool(self, pool: Pool) -> Iterator[Metric]:
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):  # the second until vLLM 0.10
            usage = GaugeMetricFamily(
                name, "Share of the KV memory that requests need, 0 to 1", labels=list(self._labels)
            )
            usage.add_metric(list(self._labels.values()), pool.usage)
            yield usage
        info = {**self._labels, "block_size": str(pool.block_tokens), "num_gpu_blocks": str(pool.blocks)}
        config = GaugeMetricFamily("vllm:cache_config_info", "Size of the KV memory, in its labels", labels=list(info))
        config.add_metric(list(info.values()), 1.0)
        yield config
