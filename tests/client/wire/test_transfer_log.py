"""The log of a transfer that takes long."""

import asyncio
import logging

import pytest

from atoll.client.wire import transfer_log
from atoll.client.wire.transfer_log import so_far, told


@pytest.mark.parametrize(
    ("first", "now", "total", "elapsed_s", "expected"),
    [
        (0, 25_000_000, 100_000_000, 10.0, "25.0 MB of 100.0 MB (25%), 30 s left"),
        (50_000_000, 75_000_000, 100_000_000, 10.0, "75.0 MB of 100.0 MB (75%), 10 s left"),
        (5, 5, 100, 10.0, "5 B of 100 B (5%), nothing arrives"),
        (0, 0, 0, 10.0, "0 B of 0 B (100%), nothing arrives"),
    ],
)
def test_bytes_that_were_there_before_say_nothing_of_the_speed(
    first: int, now: int, total: int, elapsed_s: float, expected: str
) -> None:
    assert so_far(first, now, total, elapsed_s) == expected


@pytest.mark.real
def test_a_long_transfer_is_told_of_and_a_short_one_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def transfer(*, until_told: bool) -> None:
        with told("downloading", 100, lambda: 10):
            await asyncio.sleep(0)
            while until_told and not caplog.messages:
                await asyncio.sleep(0)

    asyncio.run(transfer(until_told=False))
    assert caplog.messages == []
    monkeypatch.setattr(transfer_log, "EVERY_S", 0.0)
    asyncio.run(transfer(until_told=True))
    assert caplog.messages[0] == "downloading: 10 B of 100 B (10%), nothing arrives"
