"""Metrics that one thread writes and nothing has to lock: a router has three to note of every token, and the library's take a
tenth of what it does for one. What is scraped is the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class PlainCounter(Collector):
    """Registers itself. `value` may be read, and added to."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self.value = 0
        self._name, self._documentation = name, documentation
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, value=self.value)


class PlainCounts(Collector):
    """A counter by one label. Registers itself. `values` may be read, added to and taken from."""

    def __init__(self, name: str, documentation: str, label: str, registry: CollectorRegistry) -> None:
        self.values: dict[str, int] = {}
        self._name, self._documentation, self._label = name, documentation, label
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=[self._label])
        for value, count in self.values.items():
            family.add_metric([value], count)
        yield family


class PlainHistogram(Collector):
    """Registers itself. buckets: upper bounds, rising; those above the last are counted too."""

    def __init__(self, name: str, documentation: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = (*buckets, float("inf"))
        self._counts = [0 for _ in self._bounds]
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """The same value so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        names = map(floatToGoString, self._bounds)
        buckets = [(name, float(count)) for name, count in zip(names, accumulate(self._counts), strict=True)]
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)
