"""Federations in which only what is trained travels: deployed as simulated, and sites with other frozen tensors."""

from pathlib import Path

import pytest

from atoll.tensors import safetensors_file
from atoll.training.model.frozen import frozen_digest
from atoll.training.model.parameters import build_model
from tests.federation.adapters import frozen_task
from tests.federation.processes import federation
from tests.simulations.federation.simulating import simulate

TASK = str(Path(frozen_task.__file__)) + ":task"
RUN = {"name": "frozen", "rounds": 3, "seed": 7, "round__cohort_size": 3, "round__min_available": 3}


@pytest.mark.slow
def test_a_deployed_run_has_the_bits_of_a_simulated_one_and_sends_the_head_alone(tmp_path):
    simulated, _ = simulate(
        *(tmp_path / "simulated", "name=frozen", "rounds=3", "seed=7", "round.cohort_size=3", "round.min_available=3"),
        task=TASK,
    )
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(**RUN)
        for site in frozen_task.SITES:
            it.agent(site, threads=1)
        assert it.wait_for_end() == 0, it.log("coordinator")
        versions = it.show("model", "list", "--run", "frozen-1")
        digest = it.history().run("frozen-1").config.model.frozen
        (newest,) = it.state.glob("**/versions/000003.safetensors")
        assert set(safetensors_file.read(newest)) == {"2.weight", "2.bias"}
    assert versions[-1]["digest"] == simulated["model_digest"]
    assert digest == frozen_digest(build_model(frozen_task.task, 7))


@pytest.mark.slow
def test_a_site_with_other_frozen_tensors_is_refused_by_name_and_the_others_go_on(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    source = Path(frozen_task.__file__).read_text()
    (other / "frozen_task.py").write_text(source.replace("STD = 0.3", "STD = 0.4"))
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(**RUN, round__quorum=2)
        for site in frozen_task.SITES:
            here = f"{other / 'frozen_task.py'}:task"
            it.agent(site, threads=1, tasks=[here] if site == "east" else None, exit_when_done=site != "east")
        assert it.wait_for_end() == 0, it.log("coordinator")
        ours, digest = frozen_digest(_model_of(source)), it.history().run("frozen-1").config.model.frozen
        log = it.log("east")
    assert ours == digest
    assert f"and {digest} in the run" in log
    assert f"their digest is {frozen_digest(_model_of(source.replace('STD = 0.3', 'STD = 0.4')))} at east" in log


def _model_of(source):
    names = {}
    exec(source, names)
    return build_model(names["task"], RUN["seed"])
