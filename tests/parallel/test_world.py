import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from atoll.parallel.checkpoint.ranks import Ranks, patient_ranks
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.mesh import AXES, Mesh
from atoll.parallel.world import SLURM_PORTS, World, is_lost_peer, meeting_place, process_group, ranks_here, read_world
from tests.parallel.ranks import call_on_ranks


def test_a_process_without_a_launcher_is_alone() -> None:
    assert read_world({}) == World(0, 0, 1)


def test_torchrun_s_variables_are_read() -> None:
    assert read_world({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}) == World(5, 1, 8)


def test_mpirun_s_variables_are_read() -> None:
    found = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    assert read_world(found) == World(3, 3, 4)


STEP = {
    **{"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "11", "SLURM_NODEID": "1"},
    **{"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_STEP_NODELIST": "gpu[03-04,12]-a,login1"},
    **{"SLURM_JOB_ID": "41234", "SLURM_STEP_ID": "2", "SLURM_NTASKS": "64"},
}
"""Variables of a task that `srun` starts without torchrun, in a job of 64 tasks."""


def test_the_variables_of_a_slurm_step_are_read() -> None:
    assert read_world(STEP) == World(5, 1, 11)
    assert ranks_here(STEP) == 4
    assert ranks_here({**STEP, "SLURM_NODEID": "2"}) == 3
    assert meeting_place(World(5, 1, 11), STEP) == ("gpu03-a", SLURM_PORTS[41_236 % 10_000])


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[1-4]", "n1"), ("n[07,09-11]", "n07"), ("r[1-2]n[01-08],x", "r1n01")],
)
def test_the_ranks_of_a_step_meet_on_its_first_node(nodes: str, first: str) -> None:
    assert meeting_place(World(0, 0, 2), {**STEP, "SLURM_STEP_NODELIST": nodes})[0] == first


def test_torchrun_under_srun_and_addresses_that_are_given_come_first() -> None:
    torchrun = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    alone = STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert read_world(alone | torchrun) == World(3, 3, 8)
    assert ranks_here(alone | torchrun) == 8
    with pytest.raises(ValueError, match="set MASTER_ADDR and MASTER_PORT"):
        meeting_place(World(3, 3, 8), alone | torchrun)
    given = STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}
    assert meeting_place(World(5, 1, 11), given) == ("10.0.0.1", 5)


def test_a_batch_script_is_no_rank_of_its_job() -> None:
    """It has SLURM_PROCID=0 and the job's number of tasks, and would wait for ranks that nobody starts."""
    assert read_world({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "64"}) == World(0, 0, 1)


def test_the_ranks_of_this_machine_are_those_that_a_launcher_tells() -> None:
    ranks = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    assert ranks_here({}) == 1
    assert ranks_here({**ranks, "LOCAL_WORLD_SIZE": "4"}) == 4
    assert ranks_here({**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}) == 2
    assert ranks_here(ranks) is None, "they may be on one machine or on eight"


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "RANK"),
        ({"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}, "RANK=8"),
        ({"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, "LOCAL_RANK=1"),
        ({"RANK": "zero", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "zero"),
    ],
)
def test_what_a_launcher_got_wrong_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_world(environ)


def test_ranks_that_nobody_tells_where_to_meet_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ValueError, match=r"^set MASTER_ADDR to the address where the 2 ranks meet; .*mpirun takes -x"):
        with process_group(World(0, 0, 2)):
            pass


@pytest.mark.real
def test_a_group_that_its_user_has_destroyed_is_not_destroyed_again() -> None:
    with process_group(World(0, 0, 1)):
        dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.real
def test_every_group_of_a_block_has_its_timeout() -> None:
    """Otherwise a hung rank of a mesh's axis would be noticed after torch's half an hour."""
    before = distributed_c10d.default_pg_timeout
    with process_group(World(0, 0, 1), timeout_s=7.0):
        ranks = Ranks()
        axes = Axes(Mesh(), "cpu")
        groups = [dist.group.WORLD, ranks.group, *(axes.group(axis) for axis in AXES)]
        timeouts = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
        assert timeouts == [timedelta(seconds=7)] * len(groups)
    assert distributed_c10d.default_pg_timeout == before


def slow_first_rank() -> list[int]:
    """The ranks in their order, of which the first comes two seconds after the others stop to wait."""
    with process_group(read_world(), timeout_s=3.0), patient_ranks() as ranks:
        if ranks.is_first:
            time.sleep(5.0)
        return ranks.gather(ranks.rank)


@pytest.mark.real
def test_ranks_wait_for_one_that_reads_a_large_file() -> None:
    assert call_on_ranks(slow_first_rank, 2) == [[0, 1], [0, 1]]


GLOO = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:22"
)


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        KeyError("connection_type"),
        ValueError("peers must be > 0"),
        ConnectionRefusedError("the feature store"),
        RuntimeError("the connection to the feature store was closed by its peer"),
        raised_from(ValueError("no such feature"), ConnectionResetError("reset by peer")),
    ],
    ids=repr,
)
def test_a_user_s_error_is_no_lost_peer_whatever_its_words(error: Exception) -> None:
    assert not is_lost_peer(error)


@pytest.mark.parametrize(
    "error",
    [
        GLOO,
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1275, remote process exited"),
        dist.DistNetworkError("The client socket has timed out"),
        raised_from(ValueError("the step failed"), GLOO),
    ],
    ids=repr,
)
def test_an_error_of_a_backend_is_a_lost_peer(error: Exception) -> None:
    assert is_lost_peer(error)
