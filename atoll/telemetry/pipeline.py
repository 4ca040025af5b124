"""The way of readings to Prometheus and over OTLP, in OpenTelemetry's data model.

Each collection makes its points from one reading, so a series ends with what it is of. OpenTelemetry's own instruments
keep each series that ever was, and fold those beyond 2,000 into one without a word.
"""

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricReader,
    MetricsData,
    NumberDataPoint,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry

from atoll.ground.version import __version__
from atoll.telemetry.instruments import BY_NAME, Attributes, Buckets, Kind, Reading, bounded

OTLP = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
"""Environment variables of which one makes a process send its metrics by OTLP."""

CUMULATIVE = AggregationTemporality.CUMULATIVE

Read = Callable[[], Reading]


class ReadingFailed(OSError):
    """Error: the process did not answer for a reading; it starts, ends, or is busy."""


class Pipeline:
    """Readers of one process's metrics.

    Args:
        service: `service.name`, such as atoll.coordinator.
        instance: `service.instance.id`.
        read: returns a reading; on any thread.
    """

    def __init__(self, service: str, instance: str, read: Read) -> None:
        self._read, self._begun = read, time.time_ns()
        about = {"service.name": service, "service.version": __version__, "service.instance.id": instance}
        self._resource, self._scope = Resource.create(about), InstrumentationScope("atoll", __version__)
        self.registry = CollectorRegistry(auto_describe=False)
        self._readers: list[MetricReader] = [PrometheusMetricReader(registry=self.registry, scope_info_enabled=False)]
        if any(os.environ.get(name) for name in OTLP):
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

            self._readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
        for reader in self._readers:
            reader._set_collect_callback(self._collect)

    def _collect(self, reader: MetricReader, *_: Any, **__: Any) -> MetricsData:
        return metrics_of(self._read(), self._resource, self._scope, begun=self._begun, now=time.time_ns())

    def close(self) -> None:
        """End the readers; a last export over OTLP has two seconds."""
        for reader in self._readers:
            reader.shutdown(timeout_millis=2_000)


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
    metrics = [_metric(name, series, begun, now) for name, series in bounded(reading).items() if series]
    scopes = [ScopeMetrics(scope, metrics, "")]
    return MetricsData([ResourceMetrics(resource, scopes, "")])


def _metric(name: str, series: Iterable[tuple[Attributes, float | Buckets]], begun: int, now: int) -> Metric:
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
