"""Simulations of a task whose sites have data of their own: owners without rows, and data dealt anew."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.experiments import owners
from tests.cli.invoking import invoke, refused, told

TASK = f"{owners.__name__}:task"
FILLED = f"{owners.__name__}:filled"
SHORT = ["--rounds", 2, "--set", "simulation.engine=sequential", "--set", "round.cohort_size=3"]
WAY_OUT = "--drop-empty (population.drop_empty = true) leaves them out"
REFUSED = f"population: 2 sites ('empty', 'absent') have no example to train on: {WAY_OUT}"
DROPPED = "2 of 5 clients have no training examples and are left out, of evaluations too: empty, absent"
DEALT = (
    "the data of 3 sites are pooled and split among 4 clients "
    '(population.kind = "iid"): the task\'s own sites are not simulated'
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def numbers(folder: Path) -> tuple[str, list[Any]]:
    """Return the digest of a run's model, and the measured values of its rounds."""
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    digest = json.loads((folder / "result.json").read_text())["model_digest"]
    return digest, [[line[name] for name in ("train", "server", "clients", "fates")] for line in rounds]


def test_owners_without_rows_are_refused_with_the_way_out() -> None:
    assert refused("simulate", TASK, *SHORT) == [REFUSED]
    assert refused("compare", TASK, *SHORT) == [REFUSED]
    assert refused("population", TASK) == [REFUSED]
    assert refused("simulate", f"{owners.__name__}:empty", "--drop-empty", *SHORT) == [
        "population: 2 sites ('empty', 'absent') have no example to train on, and there is no other site"
    ]


def test_a_simulation_without_them_has_the_numbers_of_the_other_owners(folder: Path) -> None:
    result = invoke("simulate", TASK, "--drop-empty", *SHORT, "--out", folder / "dropped")
    assert result.exit_code == 0, result.output
    assert told(result.stderr).count(DROPPED) == 1
    assert invoke("simulate", FILLED, *SHORT, "--out", folder / "filled").exit_code == 0
    assert numbers(folder / "dropped") == numbers(folder / "filled")
    population = json.loads((folder / "dropped" / "population.json").read_text())
    assert population["dropped"] == ["empty", "absent"]
    assert population["notes"] == json.loads((folder / "dropped" / "result.json").read_text())["notes"] == [DROPPED]


def test_the_setting_in_a_toml_does_the_same(folder: Path) -> None:
    (folder / "run.toml").write_text(f'task = "{TASK}"\n[population]\ndrop_empty = true\n')
    assert invoke("simulate", "run.toml", *SHORT, "--out", folder / "set").exit_code == 0
    assert invoke("simulate", TASK, "--drop-empty", *SHORT, "--out", folder / "option").exit_code == 0
    assert numbers(folder / "set") == numbers(folder / "option")


@pytest.mark.slow
def test_a_comparison_leaves_them_out_on_both_sides(folder: Path) -> None:
    shared = [*SHORT, "--set", "train.log_every=5", "--no-plot", "--json"]
    dropped = invoke("compare", TASK, "--drop-empty", *shared, "--out", folder / "dropped")
    filled = invoke("compare", FILLED, *shared, "--out", folder / "filled")
    assert dropped.exit_code == filled.exit_code == 0, dropped.output + filled.output
    assert told(dropped.stderr).count(DROPPED) == 1
    assert DROPPED not in filled.stderr
    sides = [json.loads(result.stdout) for result in (dropped, filled)]
    for one, other in zip(*(side["rows"] for side in sides), strict=True):
        assert {**one, "real_s": 0} == {**other, "real_s": 0}
    assert numbers(folder / "dropped" / "federated") == numbers(folder / "filled" / "federated")


@pytest.mark.long
@pytest.mark.real
def test_a_sweep_leaves_them_out_in_every_cell(folder: Path) -> None:
    for name in ("task", "filled"):
        (folder / f"{name}.toml").write_text(
            f'task = "{owners.__name__}:{name}"\nrounds = 1\n[round]\ncohort_size = 3\n'
            '[simulation]\nengine = "sequential"\n[grid]\nseed = [1, 2]\n'
        )
    assert refused("sweep", "task.toml")[-1] == f"seed 1 and 1 more cell: {REFUSED}"
    dropped = invoke("sweep", "task.toml", "--drop-empty", "--no-plot", "--out", folder / "dropped")
    assert dropped.exit_code == 0, dropped.output
    assert told(dropped.stderr).count(DROPPED) == 1
    assert invoke("sweep", "filled.toml", "--no-plot", "--out", folder / "filled").exit_code == 0
    cells = [sorted(path.parent for path in (folder / name).glob("*/result.json")) for name in ("dropped", "filled")]
    assert [len(found) for found in cells] == [2, 2]
    assert list(map(numbers, cells[0])) == list(map(numbers, cells[1]))


def test_clients_without_pytorch_are_left_out_as_well(folder: Path) -> None:
    asked = ["simulate", f"{owners.__name__}:arrays", *SHORT, "--set", "round.cohort_size=2", "--out", folder / "out"]
    asked += ["--set", "evaluation.server_every=0"]
    assert refused(*asked) == [f"population: site 'empty' has no example to train on: {WAY_OUT}"]
    result = invoke(*asked, "--drop-empty", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["notes"] == [
        "1 of 3 clients has no training examples and is left out, of evaluations too: empty"
    ]


def test_owners_whose_data_are_dealt_anew_are_mentioned_once(folder: Path) -> None:
    dealt = [TASK, "--clients", 4, *SHORT]
    result = invoke("simulate", *dealt, "--out", folder / "out", "--json")
    assert result.exit_code == 0, result.output
    assert told(result.stderr).count(DEALT) == 1
    assert json.loads(result.stdout)["notes"] == [DEALT]
    assert json.loads((folder / "out" / "population.json").read_text())["notes"] == [DEALT]
    assert told(invoke("simulate", *dealt, "--check").stderr).count(DEALT) == 1
    compared = invoke("compare", *dealt, "--no-plot", "--out", folder / "both")
    assert compared.exit_code == 0, compared.output
    assert told(compared.stderr).count(DEALT) == 1


def test_a_sweep_mentions_each_population_once(folder: Path) -> None:
    (folder / "grid.toml").write_text(
        f'task = "{TASK}"\n[population]\nkind = "iid"\n[round]\ncohort_size = 2\n'
        '[grid]\n"population.clients" = [4, 5]\nseed = [1, 2, 3]\n'
    )
    result = invoke("sweep", "grid.toml", "--check")
    assert result.exit_code == 0, result.output
    four, five = told(result.stderr)
    assert four == f"clients 4, seed 1 and 2 more cells: {DEALT}"
    assert "split among 5 clients" in five
