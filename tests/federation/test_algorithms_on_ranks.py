"""What the fold does beside a mean, on two ranks: real processes, and the bits, or the formula, of one."""

from pathlib import Path

import numpy as np
import pytest

from atoll.operations import admin
from atoll.server.journal.holder import running_coordinator
from atoll.tensors.safetensors_file import read
from tests.federation.processes import federation
from tests.federation.test_asynchronous import FEDASYNC, counted, worked_out
from tests.federation.test_ranks import digests, is_finished

TASK = str(Path(__file__).with_name("quadratics_task.py")) + ":task"
RUNS = {
    "scaffold": """
        rounds = 3
        aggregation = {algorithm = "scaffold", num_clients = 2, weighting = "uniform"}
        local = {epochs = 10, batch_size = "none"}""",
    "nova": """
        rounds = 2
        aggregation = {algorithm = "fednova"}
        optimizer = {name = "fedadam", lr = 0.5}
        local = {epochs = 3}""",
}
BOUNDED = {"name": "bounded", "rounds": 1, "aggregation__norm_bound": "median", "aggregation__codec": "bf16"}


def run_all(folder, num_ranks):
    """The digests of all versions of these runs, and the last one of SCAFFOLD as it is exported."""
    folder.mkdir()
    with federation(folder, task=TASK) as it:
        it.coordinator(**BOUNDED, stay=True, coordinator__aggregators=num_ranks)
        for site in "ab":
            it.agent(site, exit_when_done=False)
        it.wait_for(lambda: running_coordinator(it.state))
        for name, settings in RUNS.items():
            admin.start(it.state, f'task = "{TASK}"\nname = "{name}"\nevaluation.server_every = 0\n{settings}')
        names = ["bounded", *RUNS]
        it.wait_for(lambda: all(is_finished(it, name) for name in names), every=0.2)
        it.show("model", "export", "--run", "scaffold", "--out", folder / "model")
        return {name: digests(it, f"{name}-1") for name in names}, read(folder / "model")


@pytest.mark.long
def test_algorithms_make_the_models_of_one_process_on_two_ranks(tmp_path):
    alone, model = run_all(tmp_path / "alone", 0)
    shared, same = run_all(tmp_path / "shared", 2)
    assert [len(found) for found in alone.values()] == [2, 4, 3]
    assert shared == alone
    assert model.keys() == same.keys() == {"x", "seen", "count"}
    assert float(model["x"][0]) == float(same["x"][0]) == pytest.approx(2.702668411, rel=1e-6)


@pytest.mark.long
def test_fedasync_mixes_in_the_version_that_a_slow_site_trained_from_at_every_rank(tmp_path):
    with federation(tmp_path) as it:
        rules = {"rounds": 8, "round__max_staleness": 50, "evaluation__server_every": 0, **FEDASYNC}
        it.coordinator(**rules, coordinator__aggregators=2, coordinator__keep_versions=2)
        it.agent("a", environment={"TROUBLE_SLEEP": "0.3"})
        it.agent("b", environment={"TROUBLE_SLEEP": "1.5"})
        assert it.wait_for_end() == 0, it.log("coordinator")
        records = it.rounds()
        assert len(counted(records)) == 8
        assert any(row.staleness > 1 for record in records for row in record.buffer)
        it.show("model", "export", "--out", tmp_path / "model")
        expected = worked_out(records, "fedasync")
        np.testing.assert_allclose(read(tmp_path / "model")["w"], np.full(50_000, expected[8]), rtol=1e-6)
