"""Two plain agents and one whose worker is a mesh of ranks, in one federation of real processes."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from atoll.tensors.safetensors_file import read
from tests.federation.crew.exact_task import SLOWED_BY, moved
from tests.federation.processes import federation
from tests.process_table import descendants, is_running
from tests.warm.start import COLD

TASK = str(Path(__file__).with_name("exact_task.py")) + ":task"


def ranks_of(it, site):
    """The processes of a site's ranks, by rank."""
    found = {}
    for process in descendants(it.running[site].pid):
        name, _, rank = Path(f"/proc/{process}/comm").read_text().strip().rpartition(" ")
        found |= {int(rank): process} if name == "atoll rank" else {}
    return found


@pytest.mark.parametrize("mesh", ["dp_shard=2", pytest.param("auto", marks=pytest.mark.long)])
def test_a_mesh_is_one_client_and_its_losses_are_time(tmp_path, mesh):
    """A rank is killed in round 1, the agent in round 2; the model is that of three plain clients, to the bit.

    The first agent of the mesh, its supervisor and its ranks begin by an exec.
    """
    slow = tmp_path / "slow"
    slow.touch()
    crew = {
        "crew.mesh": mesh,
        "crew.nproc": 2,
        "crew.checkpoint_every": "4 steps",
        "environment": {SLOWED_BY: str(slow)},
    }
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(rounds=3, round__cohort_size=3, round__deadline=600, coordinator__lease=300)
        it.agent("a")
        it.agent("b")
        it.agent("c", **{**crew, "environment": {**crew["environment"], COLD: "1"}})

        it.wait_for(lambda: len(it.rounds()) == 1 and it.rounds()[0].num_reported == 2)
        os.kill(ranks_of(it, "c")[1], signal.SIGKILL)
        it.wait_for(lambda: len(it.rounds()) == 2 and it.rounds()[1].num_reported == 2)
        assert "the ranks start again (1 of 3): " in it.log("c")
        left = descendants(it.running["c"].pid)
        it.kill("c")
        it.wait_for(lambda: not any(map(is_running, left)))
        slow.unlink()
        it.agent("c", **crew)

        assert it.wait_for_end() == 0
        assert it.wait_for_end("c") == 0
        for number, record in enumerate(it.rounds(), start=1):
            assert sorted(record.clients) == ["a", "b", "c"]
            assert [client.fate for client in record.clients.values()] == ["reported"] * 3, "one update of each"
            assert [client.num_examples for client in record.clients.values()] == [64] * 3
            uses = {name: client.mesh for name, client in record.clients.items()}
            assert (uses["a"], uses["b"], uses["c"].num_ranks) == (None, None, 2)
            assert uses["c"].peak_bytes > 10**6
            assert (uses["c"].mfu, uses["c"].why_no_mfu[:8]) == (
                None,
                "the peak" if uses["c"].flops_per_s else "the oper",
            )
            w = read(it.state / "runs" / "trouble-1" / "versions" / f"{number:06d}.safetensors")["w"]
            np.testing.assert_array_equal(w, number * moved().numpy())
        if mesh == "auto":
            said = [line for line in it.log("c").splitlines() if "mesh auto for " in line]
            assert len(said) >= 2
            assert len({line.partition("mesh auto for ")[2] for line in said}) == 1, "after each loss the same"
            assert "is dp_replicate=2: " in said[0]
        logs = sorted(path.name for path in (tmp_path / "c").glob("worker.*.log"))
        assert logs == [f"worker.exact_task.task{rank}.log" for rank in ("", ".rank0", ".rank1")]
