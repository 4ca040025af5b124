"""One federation of a plain client, FSDP on four ranks and TP on two: the models of plain clients, to the bit."""

from pathlib import Path

import pytest

from atoll.operations import admin
from atoll.server.journal.holder import running_coordinator
from tests.federation.processes import federation
from tests.parts.test_federation import digests, is_finished

TASK = str(Path(__file__).with_name("layers_task.py")) + ":task"
MESHES = {"a": "", "b": "dp_shard=4", "c": "tp=2"}
RUNS = {
    "plain": "rounds = 2",
    "bf16": 'rounds = 1\naggregation.codec = "bf16"',
    "fp16": 'rounds = 1\naggregation.codec = "fp16"',
}
LONG = pytest.mark.long


def models_of(folder, meshes, num_ranks=0):
    """The digests of all versions of every run, with clients of these meshes."""
    folder.mkdir()
    with federation(folder, task=TASK) as it:
        ranked = {"coordinator__aggregators": num_ranks} if num_ranks else {}
        it.coordinator(name="first", rounds=1, round__cohort_size=3, round__deadline=600, stay=True, **ranked)
        for site, mesh in meshes.items():
            it.agent(site, exit_when_done=False, **({"crew.mesh": mesh} if mesh else {"threads": 1}))
        it.wait_for(lambda: running_coordinator(it.state), every=0.1)
        for name, settings in RUNS.items():
            rounds = "round = {cohort_size = 3, deadline = 600.0}"
            admin.start(it.state, f'task = "{TASK}"\nname = "{name}"\n{settings}\n{rounds}')
        it.wait_for(lambda: all(is_finished(it, f"{name}-1") for name in (*RUNS, "first")), every=0.2)
        for name in RUNS:
            for record in it.history().rounds(f"{name}-1"):
                assert sorted(record.clients) == sorted(meshes), "one client, one update in every record"
                assert record.num_reported == len(meshes)
                assert [client.num_examples for client in record.clients.values()] == [56] * 3
        return {name: digests(it, f"{name}-1") for name in RUNS}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The models of clients of one process each."""
    found = models_of(tmp_path_factory.mktemp("plain") / "it", dict.fromkeys(MESHES, ""))
    models = [digest for name in RUNS for digest in found[name][1:]]
    assert len({*models}) == len(models), "each codec and each round makes a model of its own"
    return found


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(0, marks=LONG), pytest.param(1, marks=LONG), 2, pytest.param(4, marks=LONG)]
)
def test_clients_of_any_mesh_make_the_models_of_plain_ones(tmp_path, plain, num_ranks):
    assert models_of(tmp_path / "it", MESHES, num_ranks) == plain
