import statistics
from pathlib import Path

import pytest

from atoll.protocol.settings import ConfigError
from atoll.simulations.experiments.bands import Mean, mean_of
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import RunReport, read_run
from atoll.simulations.experiments.table import COLUMNS, Objective, chosen, markdown, rows
from tests.simulations.experiments.runs import line, write_run

OBJECTIVE = Objective("server/accuracy", 0.75)


def run(folder: Path, name: str, **changes: object) -> RunReport:
    values = {f"c{k}": {"accuracy": k / 10} for k in range(11)}
    return read_run(write_run(folder / name, [line(k, client_values=values, **changes) for k in range(1, 5)]))


def test_a_column_is_what_its_name_says(tmp_path: Path) -> None:
    report = run(tmp_path, "one", epsilon=2.0)
    found = {name: measure(report, OBJECTIVE) for name, measure in COLUMNS.items()}
    assert found == pytest.approx(
        {
            "final": 0.8,
            "best": 0.8,
            "at_common": None,
            "rounds": 4,
            "updates": 44,
            "virtual_s": 400,
            "real_s": 8,
            "bytes": 6800,
            "bytes_up": 1600,
            "rounds_to_target": 3,
            "updates_to_target": 33,
            "virtual_s_to_target": 300,
            "real_s_to_target": 6,
            "bytes_to_target": 5100,
            "bytes_up_to_target": 1200,
            "counted": 11,
            "stragglers": 2,
            "lost": 1,
            "worst_tenth": 0.1,
            "variance": 0.1,
            "epsilon": 2.0,
        }
    )


def test_cells_that_differ_in_the_seed_alone_are_one_row(tmp_path: Path) -> None:
    cells = [Cell({"rule": rule, "seed": seed}, {}, "t:t") for rule in ("mean", "median") for seed in "12"]
    reports = [run(tmp_path, str(k), server={"accuracy": value}) for k, value in enumerate((0.8, 0.9, 0.5))]
    runs = [*zip(cells, reports, ["finished"] * 3, strict=False), (cells[3], None, "failed")]
    first, second = rows(runs, OBJECTIVE, ["final", "rounds_to_target"], ["seed"])
    assert (first.varied, first.state) == ({"rule": "mean"}, "finished")
    assert first.values["final"].mean == pytest.approx(0.85)
    assert first.values["final"].std == pytest.approx(statistics.stdev([0.8, 0.9]))
    assert second.values["final"] == Mean(0.5, None, 1, 2)
    assert second.values["rounds_to_target"] == Mean(None, None, 0, 2)
    assert second.state == "failed"


def test_without_averaging_each_cell_is_a_row(tmp_path: Path) -> None:
    runs = [(Cell({"seed": seed}, {}, "t:t"), run(tmp_path, seed), "finished") for seed in "12"]
    assert [row.varied["seed"] for row in rows(runs, OBJECTIVE, ["final"], [])] == ["1", "2"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.5], "0.5"),
        ([0.5, 0.7], "0.6 ± 0.1414"),
        ([3.0, None], "3 (1 of 2)"),
        ([None], "-"),
        ([1_234_567.0], "1,234,567"),
        ([12.0, 14.0, None], "13 ± 1.414 (2 of 3)"),
    ],
)
def test_a_mean_says_how_many_it_is_of(values: list[float | None], text: str) -> None:
    assert str(mean_of(values)) == text


def test_columns_are_those_asked_for_or_those_that_suit() -> None:
    assert "bytes_to_target" in chosen(None, 0.9)
    assert not any(name.endswith("_to_target") for name in chosen(None, None))
    with pytest.raises(ConfigError, match=r"column sped: unknown \(known: final, best"):
        chosen(["sped", "final"], 0.9)
    with pytest.raises(ConfigError, match=r"column rounds_to_target: needs a target"):
        chosen(["rounds_to_target"], None)


def test_a_table_for_a_page() -> None:
    assert markdown(["a", "b"], [[1, "x|y"]]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |"
