"""The crash points of ranks: a plan ends one rank once, and without one nothing happens."""

import os
import signal
import subprocess
import sys

import pytest

from atoll.parallel.mesh_client.crash_points import STEPS, VARIABLE, PlannedEnd, reached

PROGRAM = """
from atoll.parallel.mesh_client.crash_points import reached
for index in range(4):
    print(index, flush=True)
    reached("crew.filled")
    reached("crew.mid_step")
"""


TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")


def run(folder, planned, rank, names=TORCHRUN):
    """A rank of two with a plan, which its folder may hold."""
    (folder / "plan").write_text(planned) if planned else None
    environment = {VARIABLE: str(folder / "plan"), **dict(zip(names, (rank, rank, "2"), strict=True))}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.real
@pytest.mark.parametrize(
    ("planned", "rank", "num_printed"),
    [
        ("crew.mid_step 1", "1", 1),
        ("crew.mid_step:3 1\n", "1", 3),
        ("crew.mid_step:3 1", "0", 4),
        ("crew.mid_step:5 1", "1", 4),
        ("crew.stepped 1", "1", 4),
        ("", "1", 4),
    ],
)
def test_the_planned_rank_is_killed_at_the_nth_visit_and_the_one_after_it_lives(tmp_path, planned, rank, num_printed):
    process = run(tmp_path, planned, rank)
    assert process.communicate()[0].split() == [str(index) for index in range(num_printed)]
    is_killed = num_printed < 4
    assert process.returncode == (-signal.SIGKILL if is_killed else 0)
    assert (tmp_path / "plan.done").exists() == is_killed
    if is_killed:
        after = run(tmp_path, "", rank)
        assert len(after.communicate()[0].split()) == 4, "the rank that replaces it"


@pytest.mark.real
def test_a_rank_of_mpirun_has_its_number(tmp_path):
    process = run(tmp_path, "crew.mid_step 1", "1", MPIRUN)
    assert process.communicate()[0].split() == ["0"]
    assert process.returncode == -signal.SIGKILL


@pytest.mark.real
def test_a_rank_can_be_stopped(tmp_path):
    process = run(tmp_path, "crew.filled:2 0 stop", "0")
    try:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    finally:
        process.kill()
    assert process.communicate()[0].split() == ["0", "1"]


@pytest.mark.parametrize(
    "text",
    ["", "crew.mid_step", "crew 1", "crew.mid_step:0 1", "crew.mid_step:x 1", "crew.filled 1 halt", "crew.filled -1"],
)
def test_a_plan_that_ends_no_rank_is_refused(text):
    with pytest.raises(ValueError, match=r"plans no end of a rank; allowed: STEP RANK.*crew\.stepped"):
        PlannedEnd.parse(text)


def test_every_step_has_one_name_and_may_be_passed():
    names = [name for name, _ in STEPS]
    assert len(set(names)) == len(names)
    for name, meaning in STEPS:
        assert meaning
        assert PlannedEnd.parse(f"{name}:2 3 stop") == PlannedEnd(name, 2, 3, is_stop=True)
        reached(name)
    with pytest.raises(AssertionError, match="not in STEPS"):
        reached("crew.midstep")
