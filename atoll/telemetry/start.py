"""The start and end of a process's metrics: the port is bound before anything else runs."""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, Self

from atoll.protocol.settings import ConfigError
from atoll.telemetry.instruments import DROPPED, Process, Reading, bounded
from atoll.telemetry.process import read_process

if TYPE_CHECKING:
    from atoll.server.identity.readers import Readers
    from atoll.telemetry.pipeline import Pipeline

logger = logging.getLogger(__name__)

READING_S = 5.0
"""Longest wait for the process's event loop [s]."""

PACKAGES = ("opentelemetry.exporter.otlp.proto.http", "prometheus_client")

OTLP = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
"""Environment variables of which one makes a process send its metrics by OTLP."""

INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"


class Readings(Protocol):
    """Source of a process's readings."""

    def read(self) -> Reading:
        """Return the values of now; on the event loop of the process."""

    def read_elsewhere(self) -> Reading:
        """Return the values that are read from the disk; on any thread."""


class Telemetry:
    """Metrics of one process.

    Args:
        process: the process.
        listen: host:port of the endpoint; port 0: the system chooses.

    Raises:
        ConfigError: a package is missing, a variable is not valid, or the port is in use or not allowed.
    """

    def __init__(self, process: Process, listen: str) -> None:
        if missing := [name for name in PACKAGES if not _is_installed(name)]:
            names = " and ".join(name.replace(".", "-").replace("_", "-") for name in missing)
            raise ConfigError(f"metrics: {names} not installed: pip install 'atoll[telemetry]', or leave metrics out")
        from atoll.telemetry.endpoint import Endpoint

        self._interval = interval_from(os.environ)
        try:
            self._endpoint = Endpoint(listen)
        except OSError as error:
            why = f"cannot listen on {listen}: {error.strerror or error}"
            raise ConfigError(f"metrics: {why}; name a free port of this machine") from error
        self._process: Process = process
        self._pipeline: Pipeline | None = None
        self._source: tuple[asyncio.AbstractEventLoop, Readings] | None = None
        self._has_told = False

    @property
    def address(self) -> str:
        """host:port of the endpoint."""
        return self._endpoint.address

    def serve(self, readings: Readings, instance: str, readers: "Readers | None" = None) -> None:
        """Answer from now on; call it on the event loop of the readings.

        Args:
            readings: the source.
            instance: `service.instance.id`, the same after a restart.
            readers: the check of readers' certificates; None: everyone on this machine may read.
        """
        from atoll.telemetry.pipeline import Pipeline

        self._source = asyncio.get_running_loop(), readings
        self._pipeline = Pipeline(f"atoll.{self._process}", instance, self.read, self._interval)
        self._endpoint.serve(self._pipeline.registry, readers)
        scheme = "http" if readers is None else "https"
        logger.info("metrics on %s://%s/metrics", scheme, self.address)

    def read(self) -> Reading:
        """Return the values of now, with at most `SERIES_MAX` series of each instrument; on any thread but the loop's.

        Raises:
            ReadingFailed: the event loop does not answer in time, or the process ends.
        """
        assert self._source is not None, "nothing reads before the metrics are served"
        loop, readings = self._source
        reading = (
            readings.read() if loop.is_closed() else _on_loop(loop, readings.read)
        )  # closed: it changes nothing now
        found = bounded({**reading, **readings.read_elsewhere(), **read_process()})
        dropped = {str(*of.values()): number for of, number in found[DROPPED] if number}
        if dropped and not self._has_told:
            self._has_told = True
            listed = ", ".join(f"{kind}: {number}" for kind, number in dropped.items())
            logger.warning("metrics: series are left out (%s); %s counts them", listed, DROPPED)
        return found

    def close(self) -> None:
        """End the metrics, and free the port."""
        self._endpoint.close()
        if self._pipeline is not None:
            self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def interval_from(environment: Mapping[str, str]) -> float | None:
    """Return the seconds between two exports over OTLP, by OpenTelemetry's variables; None: there are none.

    Raises:
        ConfigError: the interval is no positive number.
    """
    if not any(environment.get(name) for name in OTLP):
        return None
    text = environment.get(INTERVAL, "60000")
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise ConfigError(f"{INTERVAL}: got {text!r}; allowed: milliseconds above 0, such as 60000")
    return milliseconds / 1e3


def _on_loop(loop: asyncio.AbstractEventLoop, read: Callable[[], Reading]) -> Reading:
    """Return what a function returns on the event loop."""
    from atoll.telemetry.pipeline import ReadingFailed

    found: Future[Reading] = Future()
    try:
        loop.call_soon_threadsafe(_fulfil, found, read)
    except RuntimeError as error:  # it was closed just now
        raise ReadingFailed("no reading: the process ends") from error
    try:
        return found.result(READING_S)
    except FutureTimeout as error:
        raise ReadingFailed(f"no reading: no answer within {READING_S:g} s") from error


def _fulfil(found: "Future[Reading]", read: Callable[[], Reading]) -> None:
    """Set the result of a reading, or its exception."""
    try:
        found.set_result(read())
    except Exception as error:
        found.set_exception(error)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it
        return False
