"""When a site's data are read anew, and what the site is told."""

import logging

import pytest

from atoll.client.work.worker import Readings


def test_a_run_has_one_reading_and_another_after_its_end(tmp_path):
    readings = Readings("run", tmp_path / "readings.json")
    first = readings.of("t", "run-1")
    assert readings.of("t", "run-1") == first != readings.of("t", "run-2")
    readings.run_ended("run-1")
    assert readings.of("t", "run-1") not in (first, readings.of("t", "run-2"))


def test_each_job_has_its_reading_or_all_have_one(tmp_path):
    each, once = (Readings(reread, tmp_path / "readings.json") for reread in ("job", "never"))
    assert len({each.of("t", "run-1") for _ in range(3)}) == 3
    assert len({once.of("t", run) for run in ("run-1", "run-2")}) == 1


@pytest.mark.parametrize("content", ["", "[]", "{", '{"t": 3}'])
def test_a_broken_file_is_none(tmp_path, content):
    (tmp_path / "readings.json").write_text(content)
    Readings("run", tmp_path / "readings.json").note("t", "run-1", {"train": 5})


def test_a_reading_in_the_course_of_a_run_is_told_with_the_rows(tmp_path, caplog):
    """A new process of the agent, or of the worker, reads again what the run has read before."""
    Readings("run", tmp_path / "readings.json").note("t", "run-1", {"train": 5})
    again = Readings("run", tmp_path / "readings.json")
    with caplog.at_level(logging.INFO):
        again.note("t", "run-1", {})
        again.note("t", "run-2", {"train": 50})
        assert caplog.messages == []
        again.note("t", "run-2", {"train": 49, "test": 3})
    assert caplog.messages == ["run run-2 has read its data again during the run: rows 49 of train (50 before)"]


def test_a_resumed_run_reads_anew_without_a_warning(tmp_path, caplog):
    readings = Readings("run", tmp_path / "readings.json")
    readings.note("t", "run-1", {"train": 5})
    readings.run_ended("run-1")
    readings.note("t", "run-1", {"train": 50})
    assert caplog.messages == []
