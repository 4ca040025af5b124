import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.settings import ConfigError
from atoll.simulations.experiments.grid import Cell, Grid, read_grid

HEAD = 'task = "digits.py:task"\nrounds = 5\n[round]\nquorum = 2\n'


def grid(folder: Path, text: str, *overrides: str, head: str = HEAD) -> Grid:
    path = folder / "grid.toml"
    path.write_text(head + text)
    return read_grid(path, overrides)


def test_every_combination_is_a_cell(tmp_path: Path) -> None:
    found = grid(tmp_path, '[grid]\n"round.deadline" = [30, 60]\nseed = [1, 2, 3]\n')
    assert [tuple(cell.varied.values()) for cell in found.cells] == list(itertools.product(["30", "60"], "123"))
    assert found.columns == ("round.deadline", "seed")
    assert found.cells[4].settings == {"rounds": 5, "round.quorum": 2, "round.deadline": 60, "seed": 2}
    assert found.folder == tmp_path


def test_settings_of_a_group_change_together(tmp_path: Path) -> None:
    found = grid(
        tmp_path,
        '[[grid.rule]]\nname = "mean"\n'
        '[[grid.rule]]\nname = "trimmed mean"\naggregation = {rule = "trimmed_mean", malicious = 4}\n'
        '[[grid.rule]]\n"aggregation.rule" = "median"\n',
    )
    assert [cell.varied["rule"] for cell in found.cells] == ["mean", "trimmed mean", "rule=median"]
    assert "aggregation.rule" not in found.cells[0].settings
    assert found.cells[1].settings["aggregation.malicious"] == 4


def test_what_varies_wins_over_the_base_and_bare_dots_mean_the_same(tmp_path: Path) -> None:
    found = grid(tmp_path, "[grid]\nround.quorum = [3, 4]\n")
    assert [cell.settings["round.quorum"] for cell in found.cells] == [3, 4]


def test_a_cell_has_a_folder_that_a_person_recognizes(tmp_path: Path) -> None:
    cell = grid(tmp_path, '[grid]\n"a.rule" = ["x/y z"]\nseed = [1]\n').cells[0]
    assert cell.name == "rule x/y z, seed 1"
    assert cell.folder == f"rule=x-y-z_seed=1-{cell.digest}"


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3)),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3)),
)
def test_cells_have_the_same_folder_exactly_when_all_their_settings_are_the_same(
    one: dict[str, int], other: dict[str, int]
) -> None:
    a, b = Cell({"seed": "1"}, one, "t:t"), Cell({"seed": "1"}, other, "t:t")
    assert (a.folder == b.folder) == (one == other)


def test_settings_for_all_cells_can_be_set(tmp_path: Path) -> None:
    found = grid(tmp_path, "[grid]\nseed = [1, 2]\n", "round.quorum=7", "population.kind=iid")
    assert {(cell.settings["round.quorum"], cell.settings["population.kind"]) for cell in found.cells} == {(7, "iid")}


def test_what_a_sweep_shows_stands_in_its_table(tmp_path: Path) -> None:
    found = grid(tmp_path, '[grid]\nseed = [1]\n[sweep]\ntarget = 1\nmetric = "server/f1"\njobs = 3\n').sweep
    assert (found.target, found.metric, found.jobs, found.over) == (1.0, "server/f1", 3, ["seed"])


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ['grid: missing; allowed: a table of lists, such as "round.deadline" = [30, 60]']),
        ("[grid]\nseed = 3\n", ["grid.seed: got 3; allowed: a list of values, or of tables of settings"]),
        ("[grid]\nseed = []\n", ["grid.seed: got []; allowed: a list of values, or of tables of settings"]),
        ("[grid]\nseed = [1, 2, 1]\n", ["grid.seed: has 1 twice"]),
        ("[grid]\nx = [1, {seed = 2}]\n", ["grid.x: mixes values and tables; allowed: one of the two"]),
        (
            "[grid]\nseed = [1]\n[[grid.pair]]\nseed = 2\n",
            ["grid.pair: seed is varied by seed already"],
        ),
        (
            '[grid]\n"a b" = [1]\n',
            ["grid.a b: is not a key; allowed: names joined by dots, such as round.deadline"],
        ),
        ("[grid]\nx = [1979-05-27]\n", ["grid.x: got datetime.date(1979, 5, 27); allowed: values, or lists of values"]),
        ("[grid]\nx = [0x" + "9" * 5000 + "]\n", ["grid.x: got an integer of 20000 bits; allowed: values, or lists"]),
        ("[[grid.x]]\nname = 07:32:00\nseed = 1\n", ["grid: name: got datetime.time(7, 32); allowed: a string"]),
        (
            "x = 1979-05-27\ny = [[1]]\n[grid]\nseed = [1]\n",
            [
                "x: got datetime.date(1979, 5, 27); allowed: a value or a list",
                "y: got [[1]]; allowed: a value or a list",
            ],
        ),
        ("[grid]\nseed = [1]\n[" + ".".join("a" * 2000) + "]\n", ["is not a key"]),
        ("[grid]\nseed." + ".".join("a" * 2000) + " = [1]\n", ["allowed: a list of values, or of tables of settings"]),
        ("x = " + "[" * 5000, ["not TOML: "]),
        (
            "[grid]\nseed = [1]\n[sweep]\njobs = 0\nfoo = 1\n",
            ["sweep.jobs: got 0; allowed: integer >= 1, <= 1024", "sweep.foo: unknown key"],
        ),
        (
            '[grid]\n"local.lr" = [1]\n[sweep]\nover = ["seed", "lr"]\n',
            ["sweep.over: got 'lr'; allowed: varied settings: local.lr, seed"],
        ),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_with_every_reason(tmp_path: Path, text: str, faults: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        grid(tmp_path, text)
    for fault, expected in zip(error.value.faults, faults, strict=True):
        assert expected in fault
        assert fault.startswith(str(tmp_path / "grid.toml"))


def test_an_override_of_what_varies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--set: seed is varied by the grid"):
        grid(tmp_path, "[grid]\nseed = [1, 2]\n", "seed=3")
    with pytest.raises(ConfigError, match=r"--set: got 'seed'; allowed: key=value"):
        grid(tmp_path, "[grid]\nround.quorum = [1, 2]\n", "seed")
    with pytest.raises(ConfigError, match=r"--set: x: got datetime\.date.*; allowed: a value or a list of values"):
        grid(tmp_path, "[grid]\nseed = [1, 2]\n", "x=1979-05-27")


def test_a_grid_needs_a_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task: missing"):
        grid(tmp_path, "[grid]\nseed = [1]\n", head="")
