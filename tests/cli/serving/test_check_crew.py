"""`atoll agent --check` of a crew: its plan, and what a mesh cannot take."""

import json
from pathlib import Path

from tests.cli.invoking import invoke, refused

TASKS = Path(__file__).parents[2]
EXACT = f"{TASKS}/federation/crew/exact_task.py:task"


def test_the_plan_is_said_and_nothing_runs(tmp_path: Path) -> None:
    options = ("--site", "a", "--mesh", "dp_shard=2", "--check", "--set", f"state={tmp_path / 'state'}")
    result = invoke("agent", EXACT, *options)
    assert result.exit_code == 0, result.stderr
    assert "a crew of 2 ranks on 1 machine: dp_shard=2, ZeRO 3, fp32" in result.stderr
    assert "exact_task.py:task: ranks 0, 1: holds 1 box (" in result.stderr
    assert 'mesh = "dp_shard=2"' in result.stdout
    assert not (tmp_path / "state").exists()
    [(reference, ranks)] = json.loads(invoke("agent", EXACT, *options, "--json").stdout)["ranks"].items()
    assert reference == EXACT
    assert [(each["rank"], each["boxes"], each["peak"]) for each in ranks] == [
        (0, 1, ranks[0]["peak"]),
        (1, 1, ranks[0]["peak"]),
    ]


def test_the_planner_s_choice_is_said_with_its_reason(tmp_path: Path) -> None:
    options = ("--site", "a", "--mesh", "auto", "--nproc", "2", "--check", "--set", f"state={tmp_path / 'state'}")
    result = invoke("agent", EXACT, *options)
    assert result.exit_code == 0, result.stderr
    assert "a crew of 2 ranks on 1 machine: dp_replicate=2, ZeRO 0, fp32" in result.stderr
    assert "exact_task.py:task: mesh auto is dp_replicate=2: " in result.stderr
    assert 'mesh = "auto"' in result.stdout
    [choice] = json.loads(invoke("agent", EXACT, *options, "--json").stdout)["plans"].values()
    assert choice["plan"]["mesh"]["dp_replicate"] == 2
    assert "without activations, within half of its" in choice["why"]
    [fault] = refused("agent", f"{TASKS}/parts/parted_task.py:task", *options)
    assert "an ArrayTask trains with its own code, not on a mesh" in fault


def test_what_a_mesh_cannot_take_is_refused(tmp_path: Path) -> None:
    options = ("--site", "a", "--check", "--set", f"state={tmp_path / 'state'}")
    [fault] = refused("agent", f"{TASKS}/parts/parted_task.py:task", "--mesh", "dp=2", *options)
    assert "an ArrayTask trains with its own code, not on a mesh" in fault
    [fault] = refused("agent", EXACT, "--mesh", "tp=2", *options)
    assert "exact_task.py:task: " in fault
    [fault] = refused("agent", EXACT, "--mesh", "dp=4", "--nproc", "2", *options)
    assert "mesh dp=4 has 4 ranks, and nproc 2 start 2" in fault
