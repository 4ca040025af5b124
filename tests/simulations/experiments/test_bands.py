"""Bands and comparisons, beside what pandas and numpy make of the same runs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.settings import ConfigError
from atoll.simulations.experiments import plots
from atoll.simulations.experiments.bands import AXES, Curve, Repeats, band_of, each, largest_common, mean_of
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import RunReport, read_run
from atoll.simulations.experiments.table import Objective, as_csv, chosen, compared, rows
from tests.later import later
from tests.simulations.experiments.runs import line, write_run

pd = later("pandas")

METRIC = "server/accuracy"


def a_run(folder: Path, name: str, values: list[float | None], **every: Any) -> RunReport:
    """A run with a value in each round, and totals that grow by the given amounts."""
    lines = []
    for k, value in enumerate(values, start=1):
        totals = {key: k * by for key, by in every.items() if key != "counted"}
        lines.append(line(k, server={"accuracy": value, "loss": k / 7}, counted=every.get("counted", 11), **totals))
    return read_run(write_run(folder / name, lines), name)


curves = st.lists(
    st.lists(st.tuples(st.integers(0, 40), st.floats(-9, 9)), min_size=1, max_size=9, unique_by=lambda pair: pair[0]),
    min_size=1,
    max_size=4,
)


@given(curves)
def test_a_band_is_the_mean_and_deviation_of_the_last_values_before_each_place(
    drawn: list[list[tuple[int, float]]],
) -> None:
    """Pandas carries values forward (`ffill`) and drops the places at which a column has none; `ddof` is 1."""
    series = [pd.Series(dict(sorted(pairs)), dtype=float) for pairs in drawn]
    last = min(one.index[-1] for one in series)
    table = pd.concat(series, axis=1).sort_index().ffill().dropna()
    table = table[table.index <= last]
    band = band_of([Curve(list(one.index), list(one)) for one in series])
    assert band.xs == tuple(table.index)
    assert band.means == pytest.approx(np.mean(table.to_numpy(), axis=1), abs=1e-12)
    if len(series) > 1 and len(table):
        assert band.stds == pytest.approx(np.std(table.to_numpy(), axis=1, ddof=1), abs=1e-7)
    assert (band.stds is None) == (len(series) == 1)


def test_a_curve_is_neither_extrapolated_nor_interpolated() -> None:
    curve = Curve([2, 4, 4, 7], [0.1, 0.2, 0.3, 0.4])
    assert [curve.at(x) for x in (1.9, 2, 3.9, 4, 6.9, 7, 7.1)] == [None, 0.1, 0.1, 0.3, 0.3, 0.4, None]
    assert Curve([], []).at(0) is None
    assert largest_common([curve, Curve([], []), Curve([1, 5], [0, 0])]) == 5
    assert largest_common([]) is None


def test_runs_of_different_modes_are_compared_where_all_have_a_value(tmp_path: Path) -> None:
    """A synchronous run counts 10 updates a round and is slow, an asynchronous one 2 and is fast."""
    slow = {"counted": 10, "virtual_s": 100.0, "bytes_up": 30, "bytes_down": 70, "real_s": 5.0}
    quick = {"counted": 2, "virtual_s": 10.0, "bytes_up": 7, "bytes_down": 13, "real_s": 1.0}
    sync = a_run(tmp_path, "sync", [0.2, 0.5, 0.8], **slow)
    fast = a_run(tmp_path, "fast", [0.1 * k for k in range(1, 9)], **quick)
    frames = {
        name: pd.DataFrame(
            {"updates": np.cumsum([one["counted"] for one in run.rounds]), "y": run.curve(METRIC)[1]}
            | {"bytes": [one["bytes_up"] + one["bytes_down"] for one in run.rounds]}
            | {"time": [one["virtual_s"] for one in run.rounds], "rounds": [one["round"] for one in run.rounds]}
            | {"seconds": [one["real_s"] for one in run.rounds]}
        )
        for name, run in (("sync", sync), ("fast", fast))
    }
    cells = [(Cell({"mode": run.name}, {}, ""), run, "finished") for run in (sync, fast)]
    for by, axis in AXES.items():
        objective = compared(Objective(METRIC, 0.45, by), [sync, fast])
        common = min(frame[by].iloc[-1] for frame in frames.values())
        assert objective.common == common
        for row in rows(cells, objective, chosen(None, 0.45, by), ["seed"]):
            frame = frames[row.varied["mode"]]
            before, reached = frame[frame[by] <= common], frame[frame["y"] >= 0.45]
            wanted = None if before.empty else before["y"].iloc[-1]
            assert row.values["at_common"].mean == wanted, by
            assert row.values[axis.to_target].mean == pytest.approx(reached[by].iloc[0])
    assert (sync.updates, fast.updates) == (30, 16)


def test_a_run_that_begins_after_the_common_place_has_no_value_there(tmp_path: Path) -> None:
    late = a_run(tmp_path, "late", [None, None, 0.5], counted=10)
    early = a_run(tmp_path, "early", [0.1, 0.2], counted=10)
    objective = compared(Objective(METRIC, None, "updates"), [late, early])
    cells = [(Cell({"r": one.name}, {}, ""), one, "finished") for one in (late, early)]
    found = rows(cells, objective, ["at_common"], [])
    assert [row.values["at_common"].mean for row in found] == [None, 0.2]


def test_a_row_names_its_seeds_and_one_seed_has_no_deviation(tmp_path: Path) -> None:
    reports = [a_run(tmp_path, str(k), [0.1 * k, 0.2 * k]) for k in (1, 2, 3)]
    varied = [{"lr": "0.1", "seed": "7"}, {"lr": "0.1", "seed": "8"}, {"lr": "0.2", "seed": "7"}]
    cells = [(Cell(each, {}, ""), report, "finished") for each, report in zip(varied, reports, strict=True)]
    two, one = rows(cells, Objective(METRIC), ["final", "final@server/loss"], ["seed"])
    assert (two.over, one.over) == ({"seed": ("7", "8")}, {"seed": ("7",)})
    assert two.values["final"].std == pytest.approx(np.std([0.2, 0.4], ddof=1))
    assert one.values["final"].std is None
    assert "±" not in str(one.values["final"])
    assert two.values["final@server/loss"].mean == pytest.approx(2 / 7)
    assert as_csv([two, one]).splitlines()[0] == (
        "lr,seed,final,final_std,final_n,final_of,"
        "final@server/loss,final@server/loss_std,final@server/loss_n,final@server/loss_of,state"
    )
    assert as_csv([one]).splitlines()[1].startswith("0.2,7,0.6")
    assert as_csv([one]).splitlines()[1].split(",")[3:6] == ["", "1", "1"]


@pytest.mark.parametrize(
    ("column", "fault"),
    [
        ("rounds@server/loss", "column rounds@server/loss: allowed: COLUMN@GROUP/NAME, where COLUMN is one of final, "),
        ("final@loss", "column final@loss: allowed: COLUMN@GROUP/NAME"),
        ("at_common", "column at_common: needs an axis; add --by, one of updates, bytes, time, rounds, seconds"),
    ],
)
def test_a_column_that_has_no_meaning_is_refused(column: str, fault: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        chosen([column], 0.5)
    assert refusal.value.faults[0].startswith(fault)


def test_a_plot_has_the_mean_of_the_seeds_and_a_band_of_one_deviation(tmp_path: Path) -> None:
    runs = tuple(a_run(tmp_path, str(k), [0.1 * k, 0.2 * k, 0.3 * k]) for k in (1, 2, 4))
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots.metric_per_round(axes, [Repeats("lr 0.1", runs), runs[0]], METRIC)
    values = np.array([run.curve(METRIC)[1] for run in runs])
    assert axes.lines[0].get_ydata() == pytest.approx(values.mean(axis=0))
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    for x, mean, std in zip((1, 2, 3), values.mean(axis=0), values.std(axis=0, ddof=1), strict=True):
        heights = corners[corners[:, 0] == x][:, 1]
        assert (heights.min(), heights.max()) == pytest.approx((mean - std, mean + std))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["lr 0.1 (n = 3)", "1"]


def test_seeds_that_were_measured_at_different_times_give_steps_up_to_the_end_of_the_first(tmp_path: Path) -> None:
    runs = (
        a_run(tmp_path, "a", [0.1, 0.2, 0.3], virtual_s=10.0),
        a_run(tmp_path, "b", [0.3, 0.4], virtual_s=14.0),
    )
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots.metric_per_time(axes, [Repeats("x", runs)], METRIC)
    (drawn,) = axes.lines
    assert drawn.get_drawstyle() == "steps-post"
    assert list(drawn.get_xdata()) == [14, 20, 28]
    assert list(drawn.get_ydata()) == pytest.approx([0.2, 0.25, 0.3])


@pytest.mark.slow
def test_there_is_a_picture_of_every_metric_and_one_of_a_comparison(tmp_path: Path) -> None:
    runs = [a_run(tmp_path, name, [0.1, 0.2]) for name in "ab"]
    assert plots.metrics_plot([Repeats("x", tuple(runs))], tmp_path / "m.png").stat().st_size
    assert plots.comparison_plot(runs, METRIC, "bytes", tmp_path / "c.png").stat().st_size


def test_a_single_run_is_a_repeat_of_its_own(tmp_path: Path) -> None:
    run = a_run(tmp_path, "a", [0.1])
    assert each([run]) == [Repeats("a", (run,))]
    assert band_of([Curve([], [])]).xs == ()
    assert mean_of([None, 2.0]).std is None
    assert not math.isnan(band_of([Curve([1], [2.0]), Curve([1], [2.0])]).stds[0])  # type: ignore[index]
