"""Several runs, and backups, with real processes that are killed."""

import shutil
import signal
import subprocess
import sys

import pytest

from atoll.server.backup.backup import back_up
from atoll.server.backup.restore import restore
from atoll.server.required.losses import losses_in
from atoll.server.required.needs import needs_of
from tests.cli.invoking import ran
from tests.federation.processes import TASK, federation

PLAIN = """
import sys
from safetensors.torch import load_file
model = load_file(sys.argv[1])
print({name: sorted(set(tensor.tolist())) for name, tensor in model.items()})
"""
"""What a program that has never heard of Atoll reads of an exported model."""


def versions(it, run):
    return {row.version: row.digest for row in it.history().versions(run)}


def in_round(it, run):
    """Whether the run's open round has invited someone and waits."""
    records = it.history().rounds(run)
    return bool(records) and records[-1].phase == "collecting" and records[-1].num_in < records[-1].cohort_size


def start(it, name, rounds):
    reply = it.show("run", "start", TASK, "--set", f"name={name}", "--set", f"rounds={rounds}", *COHORT)
    return reply["run"], reply["state"]


COHORT = ("--set", "round.cohort_size=2", "--set", "evaluation.server_every=0")
SETTINGS = {"round__cohort_size": 2, "evaluation__server_every": 0}
SLOW = {"TROUBLE_SLEEP": "0.15"}


def test_two_runs_killed_in_mid_round_end_with_the_models_of_undisturbed_ones(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(rounds=2, stay=True, **SETTINGS)
        it.wait_for(lambda: bool(it.rounds()))
        assert start(it, "other", 2) == ("other-1", "running")
        for site in ("a", "b"):
            it.agent(site, environment=SLOW, exit_when_done=False)
        it.wait_for(lambda: "b joined" in it.log("coordinator"))
        it.running["b"].send_signal(signal.SIGSTOP)  # so that neither run ends meanwhile
        it.wait_for(lambda: in_round(it, "trouble-1") and in_round(it, "other-1"))
        it.kill("coordinator")
        it.running["b"].send_signal(signal.SIGCONT)
        it.coordinator(rounds=2, stay=True, **SETTINGS)
        for run in ("trouble-1", "other-1"):
            it.wait_for(lambda run=run: it.history().run(run).state == "finished")
        assert start(it, "calm", 2) == ("calm-1", "running")
        it.wait_for(lambda: it.history().run("calm-1").state == "finished")
        assert len(versions(it, "calm-1")) == 3
        assert versions(it, "trouble-1") == versions(it, "other-1") == versions(it, "calm-1")


@pytest.mark.long
def test_a_backup_of_a_run_under_way_is_whole_and_the_run_goes_on_from_it_elsewhere(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(rounds=12, **SETTINGS)
        for site in ("a", "b"):
            it.agent(site, environment=SLOW)
        it.wait_for(lambda: bool(it.rounds()) and len(versions(it, "trouble-1")) > 1)
        for number in range(3):  # at whatever instants
            assert back_up(it.state, tmp_path / f"backup{number}").strangers == ()
        back_up(it.state, tmp_path / "backup.tar")
        assert (tmp_path / "backup.tar").stat().st_mode & 0o077 == 0
        for number in range(3):
            assert losses_in(tmp_path / f"backup{number}") == []
        [before] = needs_of(tmp_path / "backup2")
        it.wait_for(lambda: len(versions(it, "trouble-1")) > before.version + 3)  # the sites are ahead of the backup
        for name in it.running:
            it.kill(name)
        shutil.move(it.state, tmp_path / "lost")
        assert "revoke" in ran("restore", tmp_path / "backup.tar", it.state).stderr
        assert it.history().run("trouble-1").state == "running"
        for site in ("a", "b"):  # an agent takes no older round of a run that it knows, until its operator says so
            ran("site", "accept-rollback", "trouble-1", "--state", tmp_path / site)
        it.coordinator(rounds=12, **SETTINGS)
        for site in ("a", "b"):
            it.agent(site)
        assert it.wait_for_end() == 0
        model = tmp_path / "model.safetensors"
        assert it.show("model", "export", "--out", model)["version"] == 12
        plain = subprocess.run([sys.executable, "-c", PLAIN, model], capture_output=True, text=True, cwd=tmp_path)
        assert plain.stdout.strip() == "{'w': [12.0]}", plain.stderr


def test_a_backup_holds_what_lies_at_the_ranks_that_the_coordinator_has_started(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(rounds=2, coordinator__aggregators=2, **SETTINGS)
        for site in ("a", "b"):
            it.agent(site)
        assert it.wait_for_end() == 0
        assert back_up(it.state, tmp_path / "backup").strangers == ()
        back_up(it.state, tmp_path / "bare", keys=False)
        of_ranks = {path.relative_to(it.state) for path in it.state.glob("aggregators/*/**/*") if path.is_file()}
        copied = {path.relative_to(tmp_path / "backup") for path in (tmp_path / "backup").rglob("*")}
        assert {path.name for path in of_ranks - copied} == {"folder_id", "lock"}
        assert list((tmp_path / "backup").glob("aggregators/*/identity/**/key.pem"))
        assert {path.name for path in (tmp_path / "bare").rglob("*.pem")} == {"public.pem"}
        restore(tmp_path / "backup", tmp_path / "new")
        assert losses_in(tmp_path / "new") == []
