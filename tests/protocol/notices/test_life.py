"""The mark of a process that lives tells the next one how it ended, and when it was last alive."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.protocol.notices.life import RUNNING, Life
from tests.waiting import BOUND_S


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def lines_at_a_start(folder: Path, caplog: pytest.LogCaptureFixture, recovered: str = "") -> list[str]:
    """What the next process tells, which then ends in order."""
    caplog.clear()
    life = Life(folder)
    life.tell(recovered)
    life.close()
    return [record.message for record in caplog.records]


def test_an_end_in_order_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert lines_at_a_start(tmp_path, caplog) == []
    assert lines_at_a_start(tmp_path, caplog, "2 finished updates") == []
    assert not (tmp_path / RUNNING).exists()


def test_an_end_without_a_goodbye_is_told_once_with_its_time_and_what_was_recovered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / RUNNING).touch()
    os.utime(tmp_path / RUNNING, (0, 1_000_000_000.5))
    told = "the last process ended without a clean exit: it was killed, or its machine went down. It was last alive at "
    assert lines_at_a_start(tmp_path, caplog, "2 finished updates") == [
        f"{told}2001-09-09 01:46:40 UTC; recovered: 2 finished updates"
    ]
    assert lines_at_a_start(tmp_path, caplog) == []


def test_a_living_process_renews_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("atoll.protocol.notices.life.RUNNING_S", 0.01)
    life = Life(tmp_path)
    wait_until((tmp_path / RUNNING).exists)
    os.utime(tmp_path / RUNNING, (0, 0))
    wait_until(lambda: (tmp_path / RUNNING).stat().st_mtime > 0)
    life.close()


def test_a_directory_that_cannot_be_written_costs_the_line_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert lines_at_a_start(tmp_path / "gone", caplog) == []
