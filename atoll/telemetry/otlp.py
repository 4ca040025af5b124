"""The sending of traces and of the metrics of single sites over OTLP, and the cursor that bounds repetitions.

cursor.json    in the folder of an export: for each run and receiver the newest round and version that were taken
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from atoll.ground.durable import write_atomically
from atoll.ground.version import __version__
from atoll.telemetry.instruments import RUN, Attributes
from atoll.telemetry.spans import Span

FILE = "cursor.json"

SITE_METRIC = "atoll.site.metric.value"

SPANS_MAX = 500
"""Largest number of spans, or of points, in one request."""

TIMEOUT_S = 10.0
"""Longest wait for a receiver, attempts included [s]."""


class ReceiverAway(OSError):
    """Error: the receiver does not take the export now; the same export continues later."""


@dataclass
class Cursor:
    """What a receiver has of a run."""

    round: int = 0
    version: int = -1


class Cursors:
    """Cursors in a folder, of one run and receiver.

    Args:
        folder: the folder.
        run: the run's id.
        receiver: address of the receiver.
    """

    def __init__(self, folder: Path, run: str, receiver: str) -> None:
        self._path, self._key = folder / FILE, f"{run} {receiver}"
        self.now = Cursor(**self._all().get(self._key, {}))

    def _all(self) -> dict[str, dict[str, int]]:
        with suppress(OSError, ValueError):  # without it everything is sent again, with the same ids
            found = json.loads(self._path.read_text())
            return dict(found)
        return {}

    def store(self) -> None:
        """Store the cursor durably."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        found = self._all() | {self._key: asdict(self.now)}
        write_atomically(self._path, json.dumps(found, indent=1).encode())


class Receiver:
    """Receiver of OTLP over HTTP.

    Args:
        address: its base address; `/v1/traces` and `/v1/metrics` are appended.
        run: the run's id.
    """

    def __init__(self, address: str, run: str) -> None:
        self.address, base = address, address.rstrip("/")
        self._spans = OTLPSpanExporter(endpoint=f"{base}/v1/traces", timeout=TIMEOUT_S)
        self._points = OTLPMetricExporter(endpoint=f"{base}/v1/metrics", timeout=TIMEOUT_S)
        self._resource, self._scope = about("atoll.coordinator", {RUN: run})

    def send_spans(self, spans: Sequence[Span]) -> None:
        """Send spans; on return the receiver has them.

        Raises:
            ReceiverAway: it does not take them.
        """
        for begin in range(0, len(spans), SPANS_MAX):
            batch = [readable(span, self._resource, self._scope) for span in spans[begin : begin + SPANS_MAX]]
            if self._spans.export(batch) is not SpanExportResult.SUCCESS:
                raise ReceiverAway(f"{self.address} does not take the spans")

    def send_points(self, points: Iterable[tuple[Attributes, float, float]]) -> None:
        """Send values of sites, each with its attributes and its instant [s since the epoch].

        Raises:
            ReceiverAway: it does not take them.
        """
        found = [NumberDataPoint(dict(of), 0, _ns(at), value) for of, value, at in points]
        for begin in range(0, len(found), SPANS_MAX):
            text = "Value of a site's metric, where its policy lets it leave"
            metric = Metric(SITE_METRIC, text, "1", Gauge(found[begin : begin + SPANS_MAX]))
            data = MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(self._scope, [metric], "")], "")])
            if self._points.export(data) is not MetricExportResult.SUCCESS:
                raise ReceiverAway(f"{self.address} does not take the metrics")

    def close(self) -> None:
        """Close the connections."""
        self._spans.shutdown()  # type: ignore[no-untyped-call]
        self._points.shutdown()


def about(service: str, attributes: Mapping[str, str]) -> tuple[Resource, InstrumentationScope]:
    """Return the resource and the scope of what a service sends."""
    resource = Resource.create({"service.name": service, "service.version": __version__, **attributes})
    return resource, InstrumentationScope("atoll", __version__)


def readable(span: Span, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    """Return a span as OpenTelemetry's exporter takes it."""

    def context(number: int) -> SpanContext:
        return SpanContext(span.trace, number, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    status = Status(StatusCode.OK) if span.error is None else Status(StatusCode.ERROR, span.error)
    return ReadableSpan(
        name=span.name,
        context=context(span.id),
        parent=context(span.parent) if span.parent else None,
        resource=resource,
        attributes=dict(span.attributes),
        kind=SpanKind.INTERNAL,
        instrumentation_scope=scope,
        status=status,
        start_time=_ns(span.begin),
        end_time=_ns(span.end),
    )


def address_from(environment: Mapping[str, str] = os.environ) -> str:
    """Return the receiver's address by OpenTelemetry's variables; empty: none is set."""
    return environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")


def _ns(seconds: float) -> int:
    """Return an instant in nanoseconds, rounded to microseconds, which a double has."""
    return round(seconds * 1e6) * 1000
