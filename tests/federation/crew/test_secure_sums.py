"""Secure sums of plain agents and one whose worker is a mesh of ranks: real processes, kill -9, the plain model."""

import numpy as np
import pytest

from atoll.parallel.mesh_client.crash_points import VARIABLE
from atoll.tensors.safetensors_file import read
from benchmarks.sums_evidence import faults_of_promises, left_behind, promises_of
from tests.cli.invoking import said
from tests.federation.crew.exact_task import moved
from tests.federation.crew.test_federation import TASK
from tests.federation.processes import federation

SECURE = {
    "secure__clip_norm": 300.0,
    "secure__bits": 64,
    "secure__examples_max": 100,
    "secure__stage_timeout": 120,
    "round__cohort_size": 3,
    "round__deadline": 600,
    "coordinator__lease": 300,
}


@pytest.mark.parametrize("aggregators", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_mesh_and_plain_clients_open_the_sum_of_plain_ones_whatever_dies(tmp_path, aggregators):
    """A rank dies once its part is encoded, another once its part is masked, the agent once the update is encoded.

    The next agent has another mesh, which masks what the first one has encoded. The sum has the bits of plain clients.
    """
    plan = tmp_path / "plan"
    plan.write_text("crew.part_encoded 1")
    crew = {"crew.nproc": 2, "crew.checkpoint_every": "4 steps"}
    environment = {VARIABLE: str(plan), "ATOLL_CRASH_AT": "agent.encoded:2"}
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(rounds=2, **SECURE, **({"coordinator__aggregators": aggregators} if aggregators else {}))
        it.agent("a")
        it.agent("b")
        it.agent("c", **{"crew.mesh": "dp_shard=2"}, **crew, environment=environment)
        it.wait_for((tmp_path / "plan.done").exists)
        plan.write_text("crew.part_masked 0")
        it.wait_for(lambda: not plan.exists())
        it.running["c"].wait()  # it kills itself in the second round
        encoded = sorted(path.name for path in (it.folder / "c" / "encoded").glob("*/part.*"))
        assert encoded == ["part.0000", "part.0000.json", "part.0001", "part.0001.json"]
        it.agent("c", **{"crew.mesh": "dp_replicate=2"}, **crew)

        assert it.wait_for_end() == 0
        assert it.wait_for_end("c") == 0
        log = it.log("c")
        assert log.count("the ranks start again (1 of 3): ") == 2
        assert log.count("encoded the update of round 1 ") == 1
        assert log.count("encoded the update of round 2 ") == 1
        assert "so this process does" not in log
        for number, record in enumerate(it.rounds(), start=1):
            assert (record.phase, sorted(record.clients)) == ("committed", ["a", "b", "c"])
            assert [client.fate for client in record.clients.values()] == ["reported"] * 3
            assert {client.num_examples for client in record.clients.values()} == {1}
            out = it.folder / f"{number}.safetensors"
            said("model", "export", number, "--run", "trouble-1", "--out", out, "--state", it.state)
            np.testing.assert_array_equal(read(out)["w"], number * moved().numpy())
        assert faults_of_promises(promises_of(it.folder / "c")) == []
        assert left_behind(it.folder / "c") == []
