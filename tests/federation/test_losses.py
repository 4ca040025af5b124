"""Real processes: the file of an accepted update is gone when the coordinator starts again, as in an older copy."""

import shutil
import subprocess

from tests.federation.processes import ATOLL, federation

SETTINGS = {"rounds": 2, "round.cohort_size": 2, "round.retry": 0, "round.retry_wait": 0}


def test_a_start_without_an_accepted_update_is_refused_and_with_accept_losses_the_run_ends_finished(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(**SETTINGS)
        it.agent("a")
        it.agent("b", environment={"TROUBLE_SLEEP": "8"}.items())
        it.wait_for(lambda: (record := it.open_round()) is not None and record.num_reported == 1)
        it.kill("coordinator")
        shutil.copytree(it.state, tmp_path / "copy", ignore=shutil.ignore_patterns("lock", "alive"))
        [file] = it.state.glob("runs/trouble-1/updates/*.bin")
        file.unlink()
        assert it.coordinator(**SETTINGS).wait(60) == 2
        said = it.log("coordinator").splitlines()[-2:]
        assert said[0].startswith(f"atoll: run trouble-1: {file} is missing: it is the accepted update of a in round 1")
        assert "start once with --accept-losses" in said[1]
        checked = subprocess.run(
            [ATOLL, "coordinator", "--state", it.state, "--check"], capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stderr.splitlines()[-1]) == (2, said[0])
        whole = subprocess.run([ATOLL, "coordinator", "--state", tmp_path / "copy", "--check"], capture_output=True)
        assert whole.returncode == 0, whole.stderr
        it.coordinator(extra=("--accept-losses",), **SETTINGS)
        assert it.wait_for_end() == 0
        log = it.log("coordinator")
        assert f"accepted by --accept-losses: run trouble-1: {file} is missing" in log
        assert f"lost on the coordinator's disk: 1 accepted update: {file.name} is missing" in log
        assert "round 1: abandoned: files_lost" in log
        assert "retry 1 of" not in log
        first, *others = it.rounds()
        assert (first.clients["a"].reason, first.clients["a"].used_in) == ("update_lost", None)
        assert sum(record.phase == "committed" for record in others) == 2
