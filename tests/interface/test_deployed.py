"""`atoll.connect`: a deployed run watched, changed and read from Python, also inside of a loop and after a kill."""

import asyncio
import json
import subprocess
import time

import numpy as np
import pytest

import atoll
from atoll.aggregation.tensors import safetensors_file
from atoll.interface.deployed import Refused
from tests.federation.processes import ATOLL, federation
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK

RUN = {"name": "python", "rounds": 3, "round__cohort_size": 4, "round__min_available": 4, "seed": 4}
CLIENTS = {"evaluation__clients_every": 1, "model__best": "accuracy", "model__source": "clients"}


@pytest.mark.slow
def test_a_run_is_watched_continued_and_read_as_by_the_command_line(tmp_path, capfd):
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(**RUN, **CLIENTS, stay=True)
        for site in line_task.SITES:
            it.agent(site, threads=1, exit_when_done=False)
        it.wait_for(lambda: "committed as version 3\n" in it.log("coordinator"))
        it.wait_for(lambda: str(it.history().run("python-1").state) == "finished")

        async def cell():
            return watched(atoll.connect(it.state), it)

        asyncio.run(cell())  # as in a notebook
        it.kill("coordinator")
        run = atoll.connect(it.state).run("python")
        assert (run.state, run.version) == ("finished", 5)
        with pytest.raises(Refused, match="no coordinator holds"):
            run.resume(rounds=9)
    assert capfd.readouterr() == ("", ""), "nothing is printed"


def watched(found, it):
    run = found.run()
    assert (run.run_id, run.state, run.version) == ("python-1", "finished", 3)
    assert run.rounds.column("version") == [1, 2, 3]
    assert run.round(2).sentences == it.show("round", "show", "2")["sentences"]
    assert set(run.round().clients.column("client")) == set(line_task.SITES)
    sites = run.sites
    assert {(row["site"], row["version"]) for row in sites} == {(s, v) for s in line_task.SITES for v in (1, 2, 3)}
    best = next(row["version"] for row in run.versions if row["best"])
    out = it.folder / "best.safetensors"
    subprocess.check_output([ATOLL, "model", "export", "--best", "--out", out, "--state", it.state])
    assert all(np.array_equal(run.model("best")[name], array) for name, array in safetensors_file.read(out).items())
    assert run.versions[best]["metrics.clients.accuracy"] is not None
    run.resume(rounds=5, set={"local.lr": 0.05})
    it.wait_for(lambda: run.version == 5 and run.state == "finished")
    assert run.document["changes"][0]["values"]["local.lr"] == {"before": None, "after": 0.05}
    with pytest.raises(Refused, match="--set: rounds: got 2; 5 are committed already"):
        run.resume(rounds=2)
    with pytest.raises(Refused, match=r"there is no run 'nothing' \(known: python-1\)"):
        found.run("nothing")
    assert len(found.invite("east")) > 40
    asked = found.statistics(TASK)
    assert asked["answered"] == sorted(line_task.SITES)
    assert found.statistics() == found.statistics(number=1) == asked
    with pytest.raises(Refused, match="deadline 0 s; allowed"):
        found.statistics(TASK, deadline=0)
    second = found.start(TASK, set={"name": "second", "rounds": 1000, "round.min_available": 4})
    second.pause("to look at it")
    begun = time.monotonic()
    it.wait_for(lambda: second.state in ("paused", "pausing") or time.monotonic() - begun > 60)
    assert second.state == "paused"
    second.stop("seen enough")
    assert (second.state, second.cause) == ("stopped", "seen enough")
    assert json.loads(json.dumps(found.runs[-1]["run"])) == "second-1"


def test_where_there_is_no_coordinator_it_says_what_to_name(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_IDENTITY", str(tmp_path / "identity"))
    with pytest.raises(Refused, match=r"there is no state directory .*nowhere, and `atoll join` has enrolled nobody"):
        atoll.connect(tmp_path / "nowhere")
