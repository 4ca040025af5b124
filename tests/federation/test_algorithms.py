"""Algorithms in which the client takes part, as a user runs them: real processes, and fixed points in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.tensors.safetensors_file import read
from tests.federation import shifted_sites_task
from tests.federation.processes import federation
from tests.waiting import BOUND_S

TASK = str(Path(__file__).with_name("quadratics_task.py")) + ":task"
BANKS = str(Path(__file__).with_name("shifted_sites_task.py")) + ":task"
BOTH = {"round__cohort_size": 2, "evaluation__server_every": 0, "aggregation__weighting": "uniform"}


def models(it, num_rounds):
    folder = it.state / "runs" / "trouble-1" / "versions"
    return [read(folder / f"{version:06d}.safetensors") for version in range(1, num_rounds + 1)]


def run(folder, num_rounds, **settings):
    """The models of a federation of "a" and "b"."""
    with federation(folder, task=TASK) as it:
        it.coordinator(rounds=num_rounds, **BOTH, **settings)
        for site in "ab":
            it.agent(site)
        assert it.wait_for_end() == 0, it.log("coordinator")
        return models(it, num_rounds)


def control_of(it, site, round_id):
    return read(next((it.folder / site / "personal").glob(f"trouble-1.{round_id}.*.safetensors")))["control/x"]


SCAFFOLD = {
    "aggregation__algorithm": "scaffold",
    "aggregation__num_clients": 2,
    "local.epochs": 10,
    "local.batch_size": '"none"',
}
CRASHES = {
    "a": [
        "agent.spooled:2",  # in round 2: its variate is staged, no byte is sent
        "agent.answered:2",  # in round 3: accepted, and the spool still has it
    ],
    "b": [
        "agent.trained:2",  # in round 2: nothing is durable, so it trains again, to the same bits
        "agent.uploaded:2",  # in round 3: accepted perhaps, and not known here
    ],
}


@pytest.mark.long
def test_scaffold_follows_the_paper_wherever_agents_are_killed(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(rounds=5, **BOTH, **SCAFFOLD)
        for number in range(2):
            dying = {site: it.agent(site, environment={"ATOLL_CRASH_AT": CRASHES[site][number]}) for site in "ab"}
            for site, process in dying.items():
                assert process.wait(BOUND_S) == -9, it.log(site)
        for site in "ab":
            it.agent(site)
        assert it.wait_for_end() == 0, it.log("coordinator")
        found = models(it, 5)
        assert [float(model["x"][0]) for model in found[:3]] == pytest.approx(
            [3.828134775, 2.720846398, 2.702668411], rel=1e-6
        )
        assert [float(model["control/x"][0]) for model in found[:3]] == pytest.approx(
            [6.171865225, 1.107288377, 0.018177987], rel=1e-5
        )
        for round_id, model in enumerate(found[3:], start=4):
            mean = (control_of(it, "a", round_id) + control_of(it, "b", round_id)) / 2
            assert model["control/x"] == pytest.approx(mean, abs=1e-5)
        exported = tmp_path / "model.safetensors"
        it.show("model", "export", "--out", exported)
        assert read(exported).keys() == {"x", "seen", "count"}
        assert read(exported)["x"] == found[-1]["x"]


@pytest.mark.long
def test_an_agent_that_has_lost_its_variate_says_so_and_does_not_spoil_the_model(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(rounds=2, round__quorum=1, **BOTH, **SCAFFOLD)
        it.agent("a")
        dying = it.agent("b", environment={"ATOLL_CRASH_AT": "agent.answered"})
        assert dying.wait(BOUND_S) == -9, it.log("b")
        for path in (it.folder / "b" / "personal").iterdir():
            path.unlink()
        it.agent("b")
        assert it.wait_for_end() == 0, it.log("coordinator")
        record = it.rounds()[1].clients["b"]
        assert (record.fate, record.reason) == ("failed", "training_failed")
        assert "the control variate of round 1 is no longer in this agent's state directory" in record.detail


def measured(version, own, site):
    """Sum and count of the loss of a model with these tensors, by plain torch."""
    model = shifted_sites_task.make_model()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in (version | own).items()})
    inputs, targets = shifted_sites_task.load_site(site, "test").tensors
    loss = torch.nn.functional.cross_entropy(model.eval()(inputs), targets)
    return loss.item() * len(targets), len(targets)


def test_batch_norms_stay_at_their_sites_and_each_site_measures_with_its_own(tmp_path):
    settings = {"local.keep": "batchnorm", "evaluation__clients_every": 1, "evaluation__server_every": 1}
    with federation(tmp_path, task=BANKS) as it:
        it.coordinator(rounds=3, seed=5, round__cohort_size=2, round__min_available=2, pause=0.2, **settings)
        it.agent("a")
        dying = it.agent("b", environment={"ATOLL_CRASH_AT": "agent.answered:2"})
        assert dying.wait(BOUND_S) == -9, it.log("b")
        it.agent("b")
        assert it.wait_for_end() == 0, it.log("coordinator")
        version = models(it, 3)[-1]
        assert version.keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
        own = {site: read(next((it.folder / site / "personal").glob("trouble-1.3.*.safetensors"))) for site in "ab"}
        for layers in own.values():
            assert {name.split(".")[0] for name in layers} == {"1"}
            assert layers["1.num_batches_tracked"] == 3 * 4  # of every round that counted, each once
        assert not np.allclose(own["a"]["1.running_mean"], own["b"]["1.running_mean"])
        rows = {(row.version, row.source): row for row in it.history().evaluations("trouble-1")}
        sums = [measured(version, own[site], site) for site in "ab"]
        found = rows[3, "clients"].statistics["loss"]
        assert found == pytest.approx([sum(column) for column in zip(*sums, strict=True)], rel=1e-4)
        assert rows[3, "server"].statistics is None
        assert "let clients evaluate" in rows[3, "server"].detail


def test_fednova_follows_the_reference_where_sites_take_two_and_ten_steps(tmp_path):
    first, second = run(tmp_path, 2, aggregation__algorithm="fednova")
    assert first["x"] == pytest.approx([5.400845545], rel=1e-6)
    assert second["x"] == pytest.approx([3.453222027], rel=1e-6)
    np.testing.assert_array_equal(first["seen"], [6.0])  # buffers are averaged, not normalized: (2 + 10) / 2
    assert first["count"] == 6
