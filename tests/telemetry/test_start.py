"""The life of a process's metrics: readings that fail, the last export, and what the log says of series left out."""

import asyncio
import logging
import threading
from typing import Any

import pytest

from atoll.protocol.settings import ConfigError
from atoll.telemetry import start
from atoll.telemetry.instruments import SERIES_MAX, Process, Reading
from atoll.telemetry.start import Telemetry
from tests.cli.federation import wait_for
from tests.telemetry.receiver import Receiver, receiver

NAME = "atoll.rank.io"


class Counting:
    """Readings of a process: how often it was read, and `series` series."""

    def __init__(self, series: int = 1) -> None:
        self.read_times, self.series, self.fault = 0, series, False

    def read(self) -> Reading:
        if self.fault:
            raise ValueError("a planted fault")
        self.read_times += 1
        return {NAME: [({"atoll.rank": number}, self.read_times) for number in range(self.series)]}

    def read_elsewhere(self) -> Reading:
        return {}


@pytest.fixture(name="received")
def _received(monkeypatch: pytest.MonkeyPatch) -> Any:
    with receiver() as it:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", it.address)
        yield it


def sent(it: Receiver) -> list[int]:
    return [point.as_int for point in it.points.get(NAME, [])]


@pytest.fixture(name="crashes")
def _crashes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The exceptions that ended a thread."""
    found: list[object] = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    return found


def test_the_last_values_are_sent_after_the_event_loop_has_ended(received: Receiver, crashes: list[object]) -> None:
    readings = Counting()
    with Telemetry(Process.RANK, "127.0.0.1:0") as telemetry:

        async def life() -> None:
            telemetry.serve(readings, "0")

        asyncio.run(life())
        readings.read_times = 41
    assert sent(received) == [42]
    assert crashes == []


def test_a_reading_that_fails_ends_no_export(
    received: Receiver, crashes: list[object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    monkeypatch.setattr(start, "READING_S", 0.05)
    readings, is_over = Counting(), threading.Event()
    readings.fault = True

    async def life() -> None:
        telemetry.serve(readings, "0")
        await asyncio.to_thread(wait_for, lambda: "a planted fault" in caplog.text)
        readings.fault = False
        wait_for(lambda: "no answer within" in caplog.text)  # on the event loop, which answers nothing meanwhile
        await asyncio.to_thread(wait_for, lambda: sent(received))
        is_over.set()

    with caplog.at_level(logging.WARNING), Telemetry(Process.RANK, "127.0.0.1:0") as telemetry:
        asyncio.run(life())
    assert is_over.is_set()
    assert crashes == []


@pytest.mark.parametrize("interval", ["soon", "0", "-5", "nan", "inf"])
def test_an_interval_that_is_none_is_refused_before_the_port_is_bound(
    received: Receiver, monkeypatch: pytest.MonkeyPatch, interval: str
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", interval)
    with pytest.raises(ConfigError, match=f"OTEL_METRIC_EXPORT_INTERVAL: got '{interval}'; allowed: milliseconds"):
        Telemetry(Process.RANK, "127.0.0.1:0")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    Telemetry(Process.RANK, "127.0.0.1:0").close()  # nothing is sent


def test_series_that_are_left_out_are_told_once(received: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Telemetry(Process.RANK, "127.0.0.1:0") as telemetry:

        async def life() -> None:
            telemetry.serve(Counting(SERIES_MAX + 3), "0")
            for _ in range(2):
                assert len((await asyncio.to_thread(telemetry.read))[NAME]) == SERIES_MAX

        asyncio.run(life())
    (told,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert told == "metrics: series are left out (series: 3); atoll.series.dropped counts them"
