"""Runs of messages that last: kept and deleted replies, a pause, a backup, PostgreSQL, and contents of every shape."""

import json

import pytest

from tests.cli.invoking import ran
from tests.federation.processes import Federation, ended_after, federation
from tests.messages.test_messages import TASK, result, started, undisturbed  # noqa: F401 - a fixture

KEYS = ("seen", "answers", "errors")


def waiting_at_step_4(it, *, exit_when_done=True, **settings):
    """Let a program wait after its fifth exchange, and return its folder."""
    started(it, environment={"WAITS_AT": "step 4"}, **settings)
    it.agent("north", exit_when_done=exit_when_done)
    it.agent("south", exit_when_done=exit_when_done)
    folder = it.state / "runs" / "talk-1" / "program"
    it.wait_for((folder / "waits").exists)
    return folder


def state_of(it):
    (run,) = it.show("run", "list")
    return run["state"], run["cause"]


def test_replies_that_are_not_kept_are_deleted_and_past_them_a_program_cannot_be_repeated(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        folder = waiting_at_step_4(it, program__keep_replies=2)
        it.wait_for(lambda: len([*(folder.parent / "updates").glob("*.bin")]) == 4)
        it.wait_for(lambda: not [*(folder.parent / "contents").iterdir()])
        it.kill("coordinator")
        started(it, program__keep_replies=2)
        assert it.wait_for_end() != 0
        assert "the run is failed: the replies of exchange 1 are no longer kept" in it.log("coordinator")


def test_a_lost_reply_stops_the_start_and_fails_the_run_once_that_is_accepted(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        folder = waiting_at_step_4(it)
        it.kill("coordinator")
        [gone, *_] = sorted(folder.parent.glob("updates/*.bin"))
        gone.unlink()
        started(it)
        assert it.wait_for_end() == 2
        assert f"{gone} is missing: it is a reply that the program has read: the run fails" in it.log("coordinator")
        started(it, stay=True, extra=("--accept-losses",))
        it.wait_for(lambda: state_of(it)[0] == "failed" and it.log("coordinator").count("atoll coordinator on ") == 2)
        assert state_of(it)[1].endswith(f"{gone.name} is missing: it cannot be repeated")
        it.kill("coordinator")
        started(it, stay=True)  # it is told no more, and stops no other run
        it.wait_for(lambda: it.log("coordinator").count("atoll coordinator on ") == 3)


def test_a_run_pauses_and_goes_on_also_after_a_kill_of_the_coordinator(tmp_path, undisturbed):  # noqa: F811
    with federation(tmp_path, task=TASK) as it:
        folder = waiting_at_step_4(it)
        ran("run", "pause", "talk-1", "--state", it.state, "--reason", "lunch")
        assert state_of(it) == ("paused", "lunch")
        (folder / "go").touch()  # its next call is held
        it.kill("coordinator")
        started(it, stay=True)
        it.wait_for(lambda: it.log("coordinator").count("atoll coordinator on ") == 2)
        it.wait_for(lambda: "2 connected" in it.log("coordinator").rpartition("coordinator on")[2])
        assert state_of(it) == ("paused", "lunch")
        assert len(it.show("round", "list")) == 5
        assert "the server program starts again" not in it.log("coordinator")
        ran("run", "resume", "talk-1", "--state", it.state)
        it.wait_for(lambda: state_of(it)[0] == "finished")
        assert result(it) == {key: undisturbed[key] for key in KEYS}


@pytest.mark.long
def test_a_stopped_run_is_resumed_with_the_same_digests(tmp_path, undisturbed):  # noqa: F811
    with federation(tmp_path, task=TASK) as it:
        folder = waiting_at_step_4(it, exit_when_done=False, stay=True)
        ran("run", "stop", "talk-1", "--state", it.state, "--reason", "enough")
        assert state_of(it) == ("stopped", "enough")
        (folder / "go").touch()
        ran("run", "resume", "talk-1", "--state", it.state)
        it.wait_for(lambda: state_of(it)[0] == "finished")
        assert result(it) == {key: undisturbed[key] for key in KEYS}


@pytest.mark.long
def test_a_backup_of_a_running_run_of_messages_goes_on_elsewhere(tmp_path, undisturbed):  # noqa: F811
    with federation(tmp_path, task=TASK) as it:
        folder = waiting_at_step_4(it)
        ran("backup", it.state, tmp_path / "backup.tar")
        it.kill("coordinator")
        (tmp_path / "elsewhere").mkdir()
        other = Federation(tmp_path / "elsewhere", task=TASK)
        other.address = it.address
        ran("restore", tmp_path / "backup.tar", other.state)
        assert folder != other.state
        with ended_after(other):
            started(other)
            assert other.wait_for_end() == 0, other.log("coordinator")
            assert result(other) == {key: undisturbed[key] for key in KEYS}


@pytest.mark.long
@pytest.mark.real
def test_a_run_of_messages_in_postgresql_survives_a_kill_of_the_coordinator(tmp_path, undisturbed, schema_url):  # noqa: F811
    with federation(tmp_path, task=TASK) as it:
        waiting_at_step_4(it, coordinator__database=schema_url)
        it.kill("coordinator")
        started(it, coordinator__database=schema_url)
        it.start("follower", "run", "show", "talk-1", "--follow", "--after", 0, "--state", it.state)
        assert it.wait_for_end() == 0, it.log("coordinator")
        assert result(it) == {key: undisturbed[key] for key in KEYS}
        assert it.wait_for_end("follower") == 0
        assert "main() returned after 13 exchanges" in it.log("follower")
        assert [row["round"] for row in it.show("round", "list")] == [*range(1, 14)]


def test_every_shape_comes_back_as_it_was_and_what_no_message_can_have_is_refused_by_name(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        started(it, main="odd_shapes")
        it.agent("north")
        assert it.wait_for_end() == 0, it.log("coordinator")
        refused = json.loads((it.state / "runs" / "talk-1" / "program" / "result.json").read_text())
        assert len(refused) == 7
        assert all(refused.values()), refused
        assert "dtype object" in refused["query.objects"]
        assert "not JSON serializable" in refused["query.bytes"]
        assert "has the key 1; allowed in JSON: strings" in refused["query.keys"]
        assert sum(text.startswith("here: ") for text in refused.values()) == 3
