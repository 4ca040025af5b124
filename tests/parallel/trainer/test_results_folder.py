"""Folders of results: which other kinds a run meets there."""

import pytest

from atoll.parallel.trainer.results_folder import MARKS, SIMULATION, TRAINING, faults_of_place


@pytest.mark.parametrize("kind", [SIMULATION, TRAINING])
def test_a_folder_that_is_missing_empty_or_of_the_same_kind_is_free(tmp_path, kind):
    assert faults_of_place(tmp_path / "missing", kind) == []
    (tmp_path / "task.py").touch()
    for mark in MARKS:
        if MARKS[mark] == kind:
            (tmp_path / mark).touch()
    assert faults_of_place(tmp_path, kind) == []


@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_of_another_kind_is_named_with_the_way_out(tmp_path, mark):
    (tmp_path / mark).touch()
    for kind in {SIMULATION, TRAINING} - {MARKS[mark]}:
        assert faults_of_place(tmp_path, kind) == [
            f"{tmp_path}: there is {MARKS[mark]} ({mark}); choose another folder with --out"
        ]


def test_all_faults_come_at_once(tmp_path):
    (tmp_path / "log.jsonl").touch()
    (tmp_path / "state.db").touch()
    assert len(faults_of_place(tmp_path, SIMULATION)) == 2
    assert len(faults_of_place(tmp_path / "other", SIMULATION, ["run.toml", "b"])) == 2
