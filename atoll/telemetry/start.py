"""The start and end of a process's metrics: the port is bound before anything else runs."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, Self

from atoll.protocol.settings import ConfigError
from atoll.telemetry.instruments import Process, Reading

if TYPE_CHECKING:
    from atoll.telemetry.endpoint import Readers
    from atoll.telemetry.pipeline import Pipeline

logger = logging.getLogger(__name__)

READING_S = 5.0
"""Longest wait for the process's event loop [s]."""

PACKAGES = ("opentelemetry.exporter.prometheus", "opentelemetry.exporter.otlp.proto.http", "prometheus_client")


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
        ConfigError: a package is missing, or the port is in use or not allowed.
    """

    def __init__(self, process: Process, listen: str) -> None:
        if missing := [name for name in PACKAGES if not _is_installed(name)]:
            names = " and ".join(name.replace(".", "-").replace("_", "-") for name in missing)
            raise ConfigError(f"metrics: {names} not installed: pip install 'atoll[telemetry]', or leave metrics out")
        from atoll.telemetry.endpoint import Endpoint

        try:
            self._endpoint = Endpoint(listen)
        except OSError as error:
            why = f"cannot listen on {listen}: {error.strerror or error}"
            raise ConfigError(f"metrics: {why}; name a free port of this machine") from error
        self._process: Process = process
        self._pipeline: Pipeline | None = None
        self._source: tuple[asyncio.AbstractEventLoop, Readings] | None = None

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
        self._pipeline = Pipeline(f"atoll.{self._process}", instance, self._read)
        self._endpoint.serve(self._pipeline.registry, readers)
        scheme = "http" if readers is None else "https"
        logger.info("metrics on %s://%s/metrics", scheme, self.address)

    def _read(self) -> Reading:
        from atoll.telemetry.pipeline import ReadingFailed
        from atoll.telemetry.process import read_process

        if self._source is None:
            raise ReadingFailed("the process ends")
        loop, readings = self._source
        found: Future[Reading] = Future()
        try:
            loop.call_soon_threadsafe(_fulfil, found, readings.read)
            reading = found.result(READING_S)
        except (RuntimeError, FutureTimeout) as error:
            why = "the process ends" if isinstance(error, RuntimeError) else f"no answer within {READING_S:g} s"
            raise ReadingFailed(f"no reading: {why}") from error
        return {**reading, **readings.read_elsewhere(), **read_process()}

    def close(self) -> None:
        """End the metrics, and free the port."""
        self._endpoint.close()
        if self._pipeline is not None:
            self._pipeline.close()
        self._source = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
