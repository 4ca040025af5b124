"""docs/benchmarks.md: its table can be read by a program, says itself what is missed, and is what the plots show."""

import json
import re
from html import unescape
from importlib.util import find_spec

import pytest

from benchmarks.plots import IMAGES, NOTHING, PAGE, PLOTS, PROCESSORS, ROOT, description, draw, number_of, rows_of

TEXT = PAGE.read_text("utf-8")
ROWS = rows_of(TEXT)
WORDS_MAX = 1600
HEADER, LINE = "| benchmark | what is measured | bar | AMD EPYC | Intel Xeon | date |", "|---|---|---|---|---|---|"
MISSED = TEXT.partition("## Bars that are missed")[2].partition("\n## ")[0]


def wrong(rows):
    """Figures that are bold and meet their bar, or the other way round."""
    return [
        (row.benchmark, row.what, processor)
        for row in rows
        for processor in PROCESSORS
        if row.is_marked(processor) is not (row.is_met(processor) is False)
    ]


def test_every_row_names_a_script_that_runs():
    for name in {row.benchmark for row in ROWS}:
        assert find_spec(f"benchmarks.{name}") is not None
        assert f"python -m benchmarks.{name}" in (ROOT / "benchmarks" / f"{name}.py").read_text()


def test_every_benchmark_has_a_row():
    listed = re.search(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(listed[1].split()) <= {row.benchmark for row in ROWS}


def test_every_row_has_a_figure_and_a_date_and_a_bar_that_can_be_checked():
    for row in ROWS:
        assert row.bar == NOTHING or (row.bar_value is not None and row.bar[0] in "<≤≥="), row
        assert any(figure != NOTHING for figure in row.figures), row
        assert re.fullmatch(r"(by )?\d{4}-\d\d-\d\d(, loaded)?", row.date), row


def test_what_is_missed_is_bold_and_explained_and_nothing_else_is_bold():
    assert wrong(ROWS) == []
    missed = {row.benchmark for row in ROWS for processor in PROCESSORS if row.is_marked(processor)}
    missed |= {row.benchmark for row in ROWS if "not measured" in "".join(row.figures)}
    assert [name for name in missed if f"`{name}`" not in MISSED] == []


@pytest.mark.parametrize(
    ("bar", "figure"), [("< 50 ms", "50 ms"), ("≥ 2", "**2.0**"), ("= 0", "1 of 3"), ("–", "**1**")]
)
def test_a_wrong_mark_is_noticed(bar, figure):
    row = f"| [`fold`](../benchmarks/fold.py) | x | {bar} | {figure} | – | by 2026-11-25 |"
    assert len(wrong(rows_of(f"{HEADER}\n{LINE}\n{row}\n"))) == 1


@pytest.mark.parametrize("cell", ["`fold`", "[`fold`](../benchmarks/ranks.py)"])
def test_a_row_without_its_script_is_noticed(cell):
    with pytest.raises(ValueError, match="not a row"):
        rows_of(f"{HEADER}\n{LINE}\n| {cell} | x | - | 1 | – | by 2026-11-25 |\n")


def test_numbers_are_read_as_they_are_written():
    cells = ["**4.6** (against 2,760)", "< 1,000 ms", "≤ 1e-6", "2.5e-8", "1,000", "not measured: no GPU", "–"]
    assert [number_of(cell) for cell in cells] == [4.6, 1000.0, 1e-6, 2.5e-8, 1000.0, None, None]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_shows_the_rows_of_the_page(name, tmp_path):
    rows = [row for row in ROWS if PLOTS[name][0](row)]
    assert len(rows) >= 10
    assert f"images/{name}.svg" in TEXT
    assert described(IMAGES / f"{name}.svg") == json.loads(description(rows)), "run `python -m benchmarks.plots`"
    draw(rows, "x", tmp_path / "again.svg")
    assert described(tmp_path / "again.svg") == json.loads(description(rows))


def described(path):
    return json.loads(unescape(re.search(r"<dc:description>(.*?)</dc:description>", path.read_text("utf-8"))[1]))


def test_the_page_stays_a_table_with_short_notes():
    """A figure that is measured anew takes the place of the old one; its history is in the repository's."""
    prose = [line for line in TEXT.splitlines() if not line.startswith("|")]
    assert len(" ".join(prose).split()) <= WORDS_MAX
