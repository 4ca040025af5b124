"""A guarantee for examples whose sites are plain agents and a mesh of ranks, of which one dies: real processes."""

import pytest

from atoll.parallel.mesh_client.crash_points import VARIABLE
from benchmarks.crew_task import SITES
from tests.federation.processes import federation

pytestmark = pytest.mark.long

PRIVATE = {
    "privacy__unit": "example",
    "privacy__epsilon": 8.0,
    "privacy__delta": 1e-4,
    "privacy__clip_norm": 1.0,
    "privacy__sample_rate": 0.2,
    "privacy__participations_max": 4,
    "local__max_steps": 6,
}


def test_a_mesh_takes_private_steps_and_a_lost_rank_costs_time_alone(tmp_path):
    plan = tmp_path / "plan"
    plan.write_text("crew.stepped:4 1")
    with federation(tmp_path, task="benchmarks.crew_task:task") as it:
        it.coordinator(rounds=2, round__cohort_size=3, round__deadline=1200, coordinator__lease=300, **PRIVATE)
        crew = {"crew.mesh": "dp_shard=2", "crew.checkpoint_every": "3 steps"}
        it.agent("a", environment={VARIABLE: str(plan)}, **crew)
        for site in SITES[1:]:
            it.agent(site, threads=1)
        assert it.wait_for_end() == 0
        assert it.wait_for_end("a") == 0
        assert it.log("a").count("the ranks start again (1 of 3): ") == 1
        for record in it.rounds():
            assert (record.phase, sorted(record.clients)) == ("committed", SITES)
            assert [client.num_examples for client in record.clients.values()] == [64] * 3
    secret = (tmp_path / "a" / "noise.key").read_text().strip()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "noise.key"]
    assert not [path for path in files if secret.encode() in path.read_bytes()]
