"""The store of client state: each state is staged under its round until that is known to count."""

import pytest

from atoll.client.disk.client_state import KEEP, PersonalState
from atoll.client.disk.named_digest import StateDamaged
from atoll.protocol.vocabulary import RoundId, RunId

RUN = RunId("digits-1")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "personal"
    folder.mkdir()
    return folder


def stage(folder, round_id, counted=0, run=RUN, text=""):
    data = folder.parent / "own.safetensors"
    data.write_text(text or f"{run} {round_id}")
    PersonalState(folder).stage(run, RoundId(round_id), RoundId(counted), data)
    assert not data.exists()


def rounds(folder):
    return sorted(int(path.name.split(".")[-3]) for path in folder.iterdir())


def test_only_the_round_that_counted_is_found(folder):
    stage(folder, 1)
    stage(folder, 2)
    state = PersonalState(folder)  # as after a restart
    assert state.find(RUN, RoundId(0)) is None
    assert state.find(RUN, RoundId(1)).read_text() == "digits-1 1"
    assert state.find(RUN, RoundId(2)).read_text() == "digits-1 2"
    assert state.find(RUN, RoundId(3)) is None


def test_a_training_that_is_repeated_replaces_its_outcome(folder):
    stage(folder, 1, text="first")
    stage(folder, 1, text="second")
    assert PersonalState(folder).find(RUN, RoundId(1)).read_text() == "second"
    assert rounds(folder) == [1]


def test_a_state_with_other_bytes_is_refused_by_its_name(folder):
    stage(folder, 1, text="first")
    (path,) = folder.iterdir()
    for damaged in ("firsu", "firs", ""):
        path.write_text(damaged)
        with pytest.raises(
            StateDamaged, match=f"{path.name} is damaged.*; put the file of a backup back, or delete it"
        ):
            PersonalState(folder).find(RUN, RoundId(1))
    path.unlink()
    assert PersonalState(folder).find(RUN, RoundId(1)) is None


def test_what_can_count_no_more_goes(folder):
    stage(folder, 1)
    stage(folder, 2, counted=1)
    stage(folder, 5, counted=2)
    assert rounds(folder) == [2, 5]


def test_outcomes_that_wait_are_bounded_and_the_one_that_counted_stays(folder):
    for number in range(1, 40):
        stage(folder, number, counted=3 if number >= 3 else 0)
    assert rounds(folder) == [3, *range(40 - KEEP, 40)]


def test_runs_do_not_touch_each_other_and_no_run_id_leads_out_of_the_folder(folder):
    for run in ("digits-1", "digits-10", "digits", "../../evil", "."):
        stage(folder, 1, run=RunId(run))
    stage(folder, 9, counted=4)
    state = PersonalState(folder)
    for run in ("digits-10", "digits", "../../evil", "."):
        assert state.find(RunId(run), RoundId(1)).read_text() == f"{run} 1"
    assert state.find(RUN, RoundId(1)) is None
    assert len(list(folder.iterdir())) == 5
    assert {path.name for path in folder.parent.iterdir()} == {"personal"}


def test_a_new_run_of_the_same_name_sweeps_what_the_old_one_has_left(folder):
    """Begin at round 1 again, as with a coordinator's new state directory: no round has counted yet."""
    for number in range(90, 90 + KEEP):
        stage(folder, number)
    stage(folder, 1, text="new")
    assert PersonalState(folder).find(RUN, RoundId(1)).read_text() == "new"
    assert rounds(folder) == [1]


def test_client_state_on_a_volume_of_its_own_is_staged(tmp_path, other_disk):
    data = tmp_path / "own.safetensors"
    data.write_text("mine")
    PersonalState(other_disk).stage(RUN, RoundId(1), RoundId(0), data)
    assert PersonalState(other_disk).find(RUN, RoundId(1)).read_text() == "mine"
    assert not data.exists()
