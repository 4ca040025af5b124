"""A private run of real processes: its coordinator dies during a fold, and neither noise nor budget changes by it."""

import hashlib
import json
import re
import subprocess
from itertools import pairwise

import pytest

from atoll.server.views.history import History
from atoll.tensors.safetensors_file import read_metadata
from tests.cli.invoking import ran, refused, shown
from tests.federation.processes import ATOLL, federation
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK
from tests.waiting import BOUND_S

SETTINGS = {
    **{
        "name": "private",
        "rounds": 40,
        "round__cohort_size": 4,
        "round__min_available": 4,
        "evaluation__server_every": 0,
    },
    **{"aggregation__weighting": "uniform", "coordinator__keep_versions": 50},
    **{"privacy__epsilon": 6.0, "privacy__delta": 1e-5, "privacy__clip_norm": 0.5, "privacy__participations_max": 5},
}
CAUSE = "the privacy budget is spent: epsilon 6 of 6 at delta 1e-05 after 5 rounds"


def of_version(it, number):
    """Return the digests of a version's files at the coordinator or its ranks."""
    paths = sorted(it.folder.glob(f"state/**/*{number:06d}*.safetensors")) or sorted(
        path for path in it.folder.glob("state/**/*.safetensors") if str(number) in path.stem
    )
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def atoll(*command, code=0):
    """Run a real command, and return what it says to a person."""
    done = subprocess.run([ATOLL, *map(str, command)], capture_output=True, text=True, check=False, timeout=BOUND_S)
    assert done.returncode == code, done.stderr
    return done.stderr


def restored_continues(it, state, written):
    """Restore the backup of one version after five were published: nothing continues until the fifth is named."""
    atoll("restore", it.folder / "backup.tar", state)
    addresses = ("coordinator.listen=127.0.0.1:0", "coordinator.enrol=127.0.0.1:0")
    start = ("coordinator", "--state", state, "--set", addresses[0], "--set", addresses[1])
    lacking = atoll(*start, code=2)
    assert "run private-1 is private, and this state was restored from a backup of " in lacking
    assert "start the coordinator once with --published private-1=ROUND" in lacking
    assert "allowed: 1 to 1000000000" in atoll(*start, "--published", "private-1=0", code=2)
    assert "--published: got two; allowed: RUN=ROUND" in atoll(*start, "--published", "two", code=2)
    coordinator = it.start("restored", *start, "--published", "5")
    it.wait_for(lambda: str(History(state).run("private-1").state) == "finished")
    coordinator.terminate()
    coordinator.wait(BOUND_S)
    guarantee = shown("privacy", "show", "private-1", "--state", state)
    assert (guarantee["uses"], guarantee["clients_with_budget"]) == (6, 0), "1 and 2 were charged; 2 to 5 once more"
    assert History(state).versions("private-1")[-1].version == 2, "the round that was closed is folded, and none begins"
    for name, digest in written.items():
        [path] = state.glob(f"**/{name}")
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest, "with the secret of the backup it is the same"
    lines = [line for path in state.glob("audit/*.jsonl") for line in path.read_text().splitlines()]
    actions = {json.loads(line).get("action") for line in lines}
    assert {"state.restore", "privacy.published", "privacy.charge"} <= actions


def exported_with(it, sentence):
    """Export a model and a run's numbers: both say what the run guarantees."""
    out, to = it.folder / "model.safetensors", it.folder / "exported"
    ran("model", "export", "--run", "private-1", "--out", out, "--state", it.state)
    assert read_metadata(out)["privacy"] == sentence
    ran("export", "jsonl", "private-1", "--to", to, "--state", it.state)
    [rows] = [path.read_text("utf-8") for path in to.glob("**/*.jsonl")]
    assert sentence in rows
    assert rows.count("round/epsilon") == 5


@pytest.mark.slow
def test_a_coordinator_that_dies_in_its_fold_repeats_the_noise_and_refunds_nothing(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        crash = {"ATOLL_CRASH_AT": "aggregate.after_fold:2"}
        it.coordinator(**SETTINGS, privacy__clip="adaptive", environment=crash)
        for site in line_task.SITES:
            it.agent(site, threads=1)
        it.running["coordinator"].wait()
        atoll("backup", it.state, tmp_path / "backup.tar")  # with one version, and the second round closed
        written = of_version(it, 2)
        assert written, [str(path) for path in it.folder.glob("state/**/*")]
        again = ("--state", it.state, "--set", f"coordinator.listen={it.address}")
        it.start("coordinator", "coordinator", *again)
        it.wait_for(lambda: str(it.history().run("private-1").state) == "finished")
        run, rounds = it.show("run", "show", "private-1"), it.show("round", "list", "--run", "private-1")
        guarantee = it.show("privacy", "show", "private-1")
        said = ran("privacy", "show", "private-1", "--state", it.state).stdout
        of_round = ran("round", "show", "2", "--run", "private-1", "--state", it.state).stdout
        listed = ran("round", "list", "--run", "private-1", "--state", it.state).stdout
        exported_with(it, guarantee["sentence"])
        assert of_version(it, 2) == written, "the same set has the same noise"
        secret = (it.state / "noise.key").read_text().strip()
        assert secret not in it.log("coordinator")
        restored_continues(it, tmp_path / "restored", written)
    assert (run["cause"], run["version"]) == (CAUSE, 5)
    spent = [row["epsilon"] for row in rounds if row["phase"] == "committed"]
    assert spent == sorted(spent)
    assert len(spent) == 5
    assert guarantee["epsilon"] == pytest.approx(6.0, abs=1e-6)
    assert (guarantee["uses"], guarantee["clients"], guarantee["clients_with_budget"]) == (5, 4, 0)
    assert said.startswith(
        "epsilon 6 at delta 1e-05 for one client: adjacent are runs in one of which all contributions"
    )
    assert "budget: epsilon 6; 0 of 4 clients may be in a further sum, in at most 5 each" in said
    assert "Charged: 4 clients for a private sum; the most used client has spent epsilon" in of_round
    assert re.search(r"\nUpdates are clipped to norm \d", of_round)  # any: the count has noise of four clients
    assert "clipped to a norm that is 0.5 at first and follows the quantile 0.5 of their lengths" in said
    assert "epsilon" in listed.splitlines()[0]
    assert "loss" not in json.dumps(run["metrics"]), "no metric of the training is kept"


@pytest.mark.long
def test_a_coordinator_that_dies_in_its_fold_takes_off_the_same_noise_of_earlier_versions(tmp_path):
    """The third version has noises of the first two, which are drawn again from the journal's ledger."""
    apart = {"rounds": 4, "round__cohort_size": 2, "round__min_available": 2, "privacy__participations_max": 2}
    settings = SETTINGS | apart | {"privacy__mechanism": "correlated", "privacy__separation_min": 2}
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(**settings, privacy__bands=3, environment={"ATOLL_CRASH_AT": "aggregate.after_fold:3"})
        for site in line_task.SITES:
            it.agent(site, threads=1)
        it.running["coordinator"].wait()
        written = of_version(it, 3)
        assert written
        it.start("coordinator", "coordinator", "--state", it.state, "--set", f"coordinator.listen={it.address}")
        it.wait_for(lambda: str(it.history().run("private-1").state) == "finished")
        run, guarantee = it.show("run", "show", "private-1"), it.show("privacy", "show", "private-1")
        members = [{*it.show("round", "show", str(number), "--run", "private-1")["clients"]} for number in (1, 2, 3, 4)]
        assert of_version(it, 3) == written, "the noises of the last versions have the same bits"
    assert run["version"] == 4
    assert all(len(one) == 2 and not one & other for one, other in pairwise(members))
    assert (guarantee["mechanism"], guarantee["separation"], guarantee["uses"]) == ("correlated", 2, 2)
    assert guarantee["epsilon"] == pytest.approx(6.0, abs=1e-6)


@pytest.mark.long
def test_aggregation_ranks_add_the_noise_once(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(**SETTINGS, extra=("--aggregators", "2"))
        for site in line_task.SITES:
            it.agent(site, threads=1)
        it.wait_for_end()
        run = it.show("run", "show", "private-1")
    assert (run["cause"], run["version"]) == (CAUSE, 5)


def test_what_noise_cannot_cover_is_refused_before_the_run_begins(tmp_path):
    settings = [f"--set={key.replace('__', '.')}={json.dumps(value)}" for key, value in SETTINGS.items()]
    faults = refused(
        *("coordinator", TASK, "--check", "--state", tmp_path / "state", *settings),
        *("--set", "round.late=next_round", "--set", "privacy.epsilon=0", "--set", "aggregation.rule=median"),
    )
    assert len(faults) >= 1
    assert "privacy.epsilon: got 0; allowed: number > 0" in faults[0]
