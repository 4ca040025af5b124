import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.simulations.experiments import plots
from atoll.simulations.experiments.report import RunReport, read_run
from tests.simulations.experiments.runs import line, write_run

VALUES = {f"c{k}": {"accuracy": k / 10} for k in range(10)}


def run(folder: Path, name: str, **changes: Any) -> RunReport:
    lines = [line(k, client_values=VALUES, **changes) for k in (1, 2, 3)]
    return read_run(write_run(folder / name, lines), name)


def drawn(draw: Any, reports: list[RunReport]) -> Any:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw(axes, reports, "server/accuracy")
    return axes


def png_width(path: Path) -> int:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20])


@pytest.mark.slow
def test_there_is_a_file_for_each_plot_and_one_of_all(tmp_path: Path) -> None:
    files = plots.plots([run(tmp_path, "one")], tmp_path / "plots")
    assert [file.stem for file in files] == [*(name for name in plots.PLOTS if name != "utility"), "overview"]
    assert png_width(files[0]) == 768
    assert png_width(files[-1]) == 2 * 768


@pytest.mark.slow
def test_what_nobody_measured_has_no_plot(tmp_path: Path) -> None:
    report = read_run(write_run(tmp_path / "plain", [line(1), line(2)]))
    assert "fairness" not in [file.stem for file in plots.plots([report], tmp_path / "plots")]


def test_several_runs_lie_over_each_other_and_the_legend_names_them(tmp_path: Path) -> None:
    axes = drawn(plots.metric_per_round, [run(tmp_path, "fast"), run(tmp_path, "slow")])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fast", "slow"]
    assert [curve.get_ydata().tolist() for curve in axes.lines] == [[1 / 2, 2 / 3, 3 / 4]] * 2
    assert len({curve.get_color() for curve in axes.lines}) == 2


@pytest.mark.parametrize("draw", [plots.metric_per_round, plots.participation, plots.bytes_per_round])
def test_rounds_are_whole_numbers(tmp_path: Path, draw: Any) -> None:
    ticks = drawn(draw, [run(tmp_path, "one")]).get_xticks().tolist()
    assert ticks == [round(tick) for tick in ticks]


@pytest.mark.parametrize(("longest", "unit", "ends_at"), [(300, "s", 300), (1200, "min", 20), (72_000, "h", 20)])
def test_time_has_a_unit_that_a_person_reads(tmp_path: Path, longest: float, unit: str, ends_at: float) -> None:
    axes = drawn(plots.metric_per_time, [run(tmp_path, "one", virtual_s=longest)])
    assert axes.get_xlabel() == f"virtual time [{unit}]"
    assert axes.lines[0].get_xdata()[-1] == ends_at


def test_the_invited_of_a_run_are_stacked_by_what_became_of_them(tmp_path: Path) -> None:
    axes = drawn(plots.participation, [run(tmp_path, "one")])
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights == {"reported": [10] * 3, "stragglers": [2] * 3, "lost": [1] * 3}
    assert max(bar.get_y() + bar.get_height() for bar in axes.patches) == 13


def test_the_invited_of_several_runs_are_compared_by_their_means(tmp_path: Path) -> None:
    axes = drawn(plots.participation, [run(tmp_path, "one"), run(tmp_path, "two", reported=7)])
    assert [bar.get_width() for bar in axes.containers[0]] == [10, 7]


def test_bytes_add_up_and_a_codec_shows(tmp_path: Path) -> None:
    axes = drawn(plots.bytes_per_round, [run(tmp_path, "one")])
    found = {curve.get_label(): curve.get_ydata()[-1] for curve in axes.lines}
    assert found == pytest.approx({"up": 0.0012, "down": 0.0039, "up without codec": 0.003})


def test_fairness_shows_every_client_the_worst_first(tmp_path: Path) -> None:
    axes = drawn(plots.fairness, [run(tmp_path, "one")])
    assert list(axes.lines[0].get_ydata()) == [k / 10 for k in range(10)]
    assert axes.lines[1].get_ydata() == [pytest.approx(0.09)]  # numpy.percentile([0, .1, ..., .9], 10)
    assert "variance 0.083" in axes.get_legend().get_texts()[0].get_text()


def test_no_two_of_forty_runs_look_alike() -> None:
    assert len({(style["color"], style["linestyle"]) for style in plots._styles(40)}) == 40


def test_without_matplotlib_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(plots.NoMatplotlib, match=r"pip install 'atoll\[sim\]'"):
        plots.plots([run(tmp_path, "one")], tmp_path)


def private(folder: Path, name: str, epsilon: float, last: float, **more: Any) -> RunReport:
    lines = [line(k, epsilon=epsilon * k / 3, server={"accuracy": last * k / 3}) for k in (1, 2, 3)]
    place = write_run(folder / name, lines)
    settings = {"epsilon": epsilon, "delta": 1e-6, **more}
    text = "\n".join(f"{key} = {value}" for key, value in settings.items())
    (place / "run.toml").write_text(f"seed = 1\n[privacy]\n{text}\n")
    return read_run(place, name)


def test_utility_is_drawn_over_the_epsilon_that_was_spent_beside_runs_without_privacy(tmp_path: Path) -> None:
    runs = [private(tmp_path, "a", 8.0, 0.9), private(tmp_path, "b", 1.0, 0.6), run(tmp_path, "plain")]
    axes = drawn(plots.metric_per_epsilon, runs)
    assert [curve.get_xdata().tolist() for curve in axes.lines[:1]] == [[1.0, 8.0]]
    assert [curve.get_ydata().tolist() for curve in axes.lines[:1]] == [[0.6, 0.9]]
    assert list(axes.lines[1].get_ydata()) == [0.75, 0.75]
    assert axes.get_xscale() == "log"
    assert "no guarantee" in axes.get_xlabel()
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {
        "one client at delta 1e-06",
        "plain: no privacy",
    }


def test_runs_that_differ_in_more_than_their_budget_are_other_lines(tmp_path: Path) -> None:
    runs = [private(tmp_path, name, e, 0.5, clip_norm=c) for name, e, c in (("a", 8, 1), ("b", 1, 1), ("c", 1, 2))]
    axes = drawn(plots.metric_per_epsilon, runs)
    names = sorted(text.get_text() for text in axes.get_legend().get_texts())
    assert names == ["one client at delta 1e-06, clip_norm 1", "one client at delta 1e-06, clip_norm 2"]


@pytest.mark.parametrize("number", [0, 1])
def test_one_private_run_alone_or_none_has_no_plot_over_epsilon(number: int, tmp_path: Path) -> None:
    runs = [private(tmp_path, "a", 8.0, 0.9)] if number else [run(tmp_path, "one"), run(tmp_path, "two")]
    assert not drawn(plots.metric_per_epsilon, runs).has_data()
