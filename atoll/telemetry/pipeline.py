"""The way of readings to Prometheus and over OTLP.

Each scrape and each export is made from one reading, so a series ends with what it is of. OpenTelemetry's own
instruments keep each series that ever was, and fold those beyond 2,000 into one without a word.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from threading import Event, Thread
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from atoll.ground.version import __version__
from atoll.telemetry.instruments import BY_NAME, Attributes, Buckets, Instrument, Kind, Reading

logger = logging.getLogger(__name__)

CUMULATIVE = AggregationTemporality.CUMULATIVE

LAST_S = 2.0
"""Longest wait for the last export over OTLP [s]."""

Read = Callable[[], Reading]
Series = Iterable[tuple[Attributes, float | Buckets]]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily


class ReadingFailed(OSError):
    """Error: the process did not answer for a reading; it starts, ends, or is busy."""


class Pipeline:
    """Registry of one process's metrics for Prometheus, and their exports over OTLP.

    Args:
        service: `service.name`, such as atoll.coordinator.
        instance: `service.instance.id`.
        read: returns a reading; on any thread.
        interval: time between two exports over OTLP [s]; None: there are none.
    """

    def __init__(self, service: str, instance: str, read: Read, interval: float | None = None) -> None:
        about = {"service.name": service, "service.version": __version__, "service.instance.id": instance}
        resource = Resource.create(about)
        self.registry = CollectorRegistry()
        self.registry.register(_Scrape(read, resource))
        self._exports = None if interval is None else _Exports(read, resource, interval)

    def close(self) -> None:
        """End the exports; the last one has two seconds."""
        if self._exports is not None:
            self._exports.close()


class _Scrape(Collector):
    """Collector that has the values of one reading, in Prometheus's data model."""

    def __init__(self, read: Read, resource: Resource) -> None:
        self._read = read
        target = {re.sub("[^a-zA-Z0-9]+", "_", key): str(value) for key, value in resource.attributes.items()}
        self._target = InfoMetricFamily("target", "Target metadata", target)

    def collect(self) -> Iterator[Family]:
        """Yield each metric of a new reading."""
        yield self._target
        for name, series in self._read().items():
            if series:
                yield _family(BY_NAME[name], series)

    def describe(self) -> Iterator[Family]:
        """Yield nothing: a registration takes no reading."""
        yield from ()


def _family(instrument: Instrument, series: Series) -> Family:
    name, text = instrument.in_prometheus, instrument.description
    labels = [attribute.replace(".", "_") for attribute in instrument.attributes]
    found: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    if instrument.kind is Kind.HISTOGRAM:
        found = HistogramMetricFamily(name, text, labels=labels)
    else:
        found = (CounterMetricFamily if instrument.kind is Kind.COUNTER else GaugeMetricFamily)(
            name, text, labels=labels
        )
    for of, value in series:
        values = [str(of[attribute]) for attribute in instrument.attributes]
        if isinstance(value, Buckets):
            assert isinstance(found, HistogramMetricFamily)
            bounds = [*map(str, value.bounds), "+Inf"]
            found.add_metric(values, [*zip(bounds, accumulate(value.counts), strict=True)], value.total)
        else:
            assert not isinstance(found, HistogramMetricFamily)
            found.add_metric(values, value)
    return found


class _Exports:
    """Thread that exports readings over OTLP; a reading or an export that fails costs a line of the log."""

    def __init__(self, read: Read, resource: Resource, interval: float) -> None:
        self._read, self._resource, self._interval = read, resource, interval
        self._scope, self._begun = InstrumentationScope("atoll", __version__), time.time_ns()
        self._exporter, self._end = OTLPMetricExporter(), Event()
        self._thread = Thread(target=self._run, name="metrics by OTLP", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._interval):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            now = time.time_ns()
            self._exporter.export(metrics_of(self._read(), self._resource, self._scope, begun=self._begun, now=now))
        except ReadingFailed as error:
            logger.warning("no metrics by OTLP: %s", error)
        except Exception:  # a fault of ours ends neither the process nor the next export
            logger.exception("no metrics by OTLP")

    def close(self) -> None:
        """Export once more, and end."""
        self._end.set()
        self._thread.join(LAST_S)
        self._exporter.shutdown()


def metrics_of(
    reading: Reading, resource: Resource, scope: InstrumentationScope, *, begun: int, now: int
) -> MetricsData:
    """Return a reading in OpenTelemetry's data model.

    Args:
        reading: the reading.
        resource: the process.
        scope: the library.
        begun: start of the process [ns since the epoch].
        now: instant of the reading [ns since the epoch].
    """
    metrics = [_metric(name, series, begun, now) for name, series in reading.items() if series]
    scopes = [ScopeMetrics(scope, metrics, "")]
    return MetricsData([ResourceMetrics(resource, scopes, "")])


def _metric(name: str, series: Series, begun: int, now: int) -> Metric:
    instrument = BY_NAME[name]
    data: Any
    if instrument.kind is Kind.HISTOGRAM:
        points = [_histogram_point(of, found, begun, now) for of, found in series if isinstance(found, Buckets)]
        data = Histogram(points, CUMULATIVE)
    else:
        numbers = [NumberDataPoint(dict(of), begun, now, one) for of, one in series if not isinstance(one, Buckets)]
        is_gauge = instrument.kind is Kind.GAUGE
        data = Gauge(numbers) if is_gauge else Sum(numbers, CUMULATIVE, instrument.kind is Kind.COUNTER)
    return Metric(name, instrument.description, instrument.unit, data)


def _histogram_point(of: Attributes, found: Buckets, begun: int, now: int) -> HistogramDataPoint:
    return HistogramDataPoint(
        attributes=dict(of),
        start_time_unix_nano=begun,
        time_unix_nano=now,
        count=sum(found.counts),
        sum=found.total,
        bucket_counts=list(found.counts),
        explicit_bounds=list(found.bounds),
        min=None,  # type: ignore[arg-type]  # not kept
        max=None,  # type: ignore[arg-type]
    )
