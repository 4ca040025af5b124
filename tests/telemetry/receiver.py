"""A receiver of OTLP over HTTP on loopback, which keeps spans by their ids and counts the repeated ones."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver:
    """What has arrived: spans by trace and span id, resources by service, and numbers of metrics by name."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.spans: dict[tuple[str, str], list[Any]] = {}
        self.resources: list[dict[str, str]] = []
        self.points: dict[str, list[Any]] = {}
        self.failing = 0
        """Number of the next requests that are answered with 503."""
        self.address = ""

    def take(self, path: str, body: bytes) -> int:
        """Keep a request; return the status of the answer."""
        with self.lock:
            if self.failing > 0:
                self.failing -= 1
                return 503
            if path == "/v1/traces":
                for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    self.resources.append(attributes(of_resource.resource))
                    for scope in of_resource.scope_spans:
                        for span in scope.spans:
                            self.spans.setdefault((span.trace_id.hex(), span.span_id.hex()), []).append(span)
                return 200
            assert path == "/v1/metrics", path
            for metrics in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.resources.append(attributes(metrics.resource))
                for of_scope in metrics.scope_metrics:
                    for metric in of_scope.metrics:
                        data = getattr(metric, metric.WhichOneof("data"))
                        self.points.setdefault(metric.name, []).extend(data.data_points)
            return 200


def attributes(of: Any) -> dict[str, Any]:
    """Return the attributes of a resource, a span or a point."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Serve a receiver at a free port."""
    it = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            self.send_response(it.take(self.path, body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    it.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield it
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
