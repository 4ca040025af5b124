"""The notebooks of the documentation: a fresh execution gives what is stored, which names no machine and no time."""

import re
from pathlib import Path

import nbformat
import pytest

from tests.pages.due import when_due
from tests.pages.notebooks import NOTEBOOKS, PLACE, ROOT, differences, executed, is_alike, read


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        when_due(path, page=path.relative_to(ROOT).as_posix(), number=number, id=path.stem)
        for number, path in enumerate(NOTEBOOKS)
    ],
)
def test_a_fresh_execution_gives_what_is_stored(path: Path, tmp_path: Path) -> None:
    stored = read(path)
    assert differences(stored, executed(stored, tmp_path)) == [], "see `make notebooks`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_names_no_machine_and_no_time(path: Path) -> None:
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert sum(bool(cell.outputs) for cell in cells) >= 5
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type in ("stream", "execute_result", "display_data")
        texts = [output.get("text", ""), *(text for form, text in output.get("data", {}).items() if "text" in form)]
        assert not any(PLACE.search(text) for text in texts), texts


def test_the_pages_lead_to_each_notebook() -> None:
    for page in ("docs/README.md", "docs/python.md"):
        text = (ROOT / page).read_text("utf-8")
        assert {f"notebooks/{path.name}" for path in NOTEBOOKS} <= set(re.findall(r"\]\(([^)]+)\)", text))
    assert len(NOTEBOOKS) == 3


def test_the_comparison_bites() -> None:
    stored = read(NOTEBOOKS[0])
    fresh = read(NOTEBOOKS[0])
    assert differences(stored, fresh) == []
    cell = next(cell for cell in fresh.cells if cell.get("outputs"))
    cell.outputs[0] = nbformat.from_dict({"output_type": "stream", "name": "stdout", "text": "else"})
    [difference] = differences(stored, fresh)
    assert difference.startswith(f"cell {fresh.cells.index(cell)}: ")
    fresh.cells.pop()
    assert differences(stored, fresh) == [f"{len(stored.cells)} cells, and now {len(stored.cells) - 1}"]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("accuracy 0.92", "accuracy 0.93", True),
        ("accuracy 0.92", "accuracy 0.82", False),
        ("version 3", "version 4", False),
        ("round 1: committed", "round 1: abandoned", False),
        ("  0.5  True", " 0.50 True", True),
        ("<td>0.92</td>", "<td>0.91</td>", True),
        ("NaN 0.3", "0.2 0.3", False),
    ],
)
def test_numbers_with_a_fraction_may_differ_a_little(one: str, other: str, alike: bool) -> None:
    assert is_alike(one, other) is alike
