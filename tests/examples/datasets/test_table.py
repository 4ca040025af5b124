"""Tables with a column that names the owner."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.datasets.folder import BadData, data_folder
from examples.datasets.table import Columns, Table, read_table
from tests.public_data import needs_data

TEXT = """clinic,age,colour,"height, cm",ill
north,30,red,170.5,no
south,41,blue,160,yes
north,52,green,1.8e2,yes
north,63,red,175,no
"""


def read(tmp_path: Path, text: str = TEXT, **options: Any) -> Table:
    (tmp_path / "t.csv").write_text(text, "utf-8")
    how = {name: options.pop(name) for name in ("delimiter", "test_fraction") if name in options}
    return read_table(tmp_path / "t.csv", Columns(**({"site": "clinic", "target": "ill"} | options)), **how)


def test_numbers_stay_and_names_become_one_column_each(tmp_path: Path) -> None:
    table = read(tmp_path)
    inputs, labels = table.dataset.tensors
    assert table.features == ("age", "colour=blue", "colour=green", "colour=red", "height, cm")
    assert inputs.tolist()[2] == [52.0, 0.0, 1.0, 0.0, 180.0]
    assert (inputs.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert (table.classes, labels.tolist()) == (("no", "yes"), [0, 1, 1, 0])


def test_each_owner_has_its_rows_and_tests_on_its_last(tmp_path: Path) -> None:
    table = read(tmp_path)
    assert table.sites == ("north", "south")
    assert [x[0].item() for x, _ in table("north", "train")] == [30.0, 52.0]
    assert [x[0].item() for x, _ in table("north", "test")] == [63.0]
    assert (len(table("south", "train")), table("south", "test")) == (1, None)


def test_numbers_are_learned_as_numbers_unless_they_are_named_classes(tmp_path: Path) -> None:
    number = read(tmp_path, target="age", drop=["ill"])
    assert number.dataset.tensors[1].tolist() == [[30.0], [41.0], [52.0], [63.0]]
    assert number.classes == ()
    several = read(tmp_path, target=["age", "height, cm"], drop=["ill"])
    assert several.dataset.tensors[1].tolist()[0] == [30.0, 170.5]
    text = "clinic,x,ill\na,1,10\na,2,9\nb,3,10\n"
    classes = read(tmp_path, text, classes=True)
    assert (classes.classes, classes.dataset.tensors[1].tolist()) == (("9", "10"), [1, 0, 1])


def test_numbers_that_are_names_are_made_one_hot_when_asked(tmp_path: Path) -> None:
    table = read(tmp_path, "clinic,zip,ill\na,10,no\nb,9,yes\n", categorical=["zip"])
    assert table.features == ("zip=10", "zip=9")


def test_a_table_without_names_gets_them(tmp_path: Path) -> None:
    table = read(tmp_path, "a;1;no\nb;2;yes\n", header=["clinic", "x", "ill"], delimiter=";")
    assert (table.sites, table.features) == (("a", "b"), ("x",))


@pytest.mark.parametrize(
    ("text", "options", "fault"),
    [
        (TEXT.replace("160", ""), {}, r"t\.csv: line 3, column 'height, cm': '' has no value$"),
        (TEXT.replace("red", " NA"), {}, r"line 2, column 'colour': ' NA' has no value \(2 such cells in all\)"),
        (TEXT.replace("south", "?"), {}, r"line 3, column 'clinic': '\?' has no value"),
        (TEXT.replace("52", "5z"), {}, "line 4, column 'age': '5z' is no finite number, but others are"),
        (TEXT.replace("52", "inf"), {}, "line 4, column 'age': 'inf' is no finite number"),
        (TEXT.replace("52", "1e39"), {}, "line 4, column 'age': '1e39' is more than a float32 holds"),
        (TEXT.replace("41,", ""), {}, "line 3 has 4 cells, but there are 5 columns"),
        (TEXT.replace("age", "clinic"), {}, "names of columns must differ and not be empty"),
        (TEXT, {"site": "hospital"}, r"there is no column hospital \(columns: clinic, age, colour, height, cm, ill\)"),
        (TEXT, {"target": ["ill", "age"]}, "targets must be one column of classes, or columns of numbers: ill"),
        (TEXT, {"drop": ["age", "colour", "height, cm"]}, "no column is left for the inputs"),
        ("clinic,x,ill\n", {}, "has no rows"),
        ("", {}, "has no rows"),
        ('clinic,x,ill\na,"1,2\n', {}, "is no CSV"),
    ],
)
def test_what_is_wrong_is_told_with_line_and_column(tmp_path: Path, text: str, options: Any, fault: str) -> None:
    with pytest.raises(BadData, match=fault):
        read(tmp_path, text, **options)


def test_a_cell_without_a_value_does_not_matter_where_it_is_left_out(tmp_path: Path) -> None:
    assert len(read(tmp_path, TEXT.replace("160", ""), drop=["height, cm"]).dataset) == 4


def test_a_fraction_out_of_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"test_fraction: must be in \[0, 1\), got 1.0"):
        read(tmp_path, test_fraction=1.0)


@needs_data
def test_the_real_patients_are_forty_two() -> None:
    """Rows and patients by its README; the values against numpy's own reader."""
    path = data_folder("parkinsons_telemonitoring") / "parkinsons_updrs.data"
    table = read_table(path, Columns(site="subject#", target="motor_UPDRS", drop=["total_UPDRS"]))
    inputs, targets = table.dataset.tensors
    assert (len(table.sites), inputs.shape) == (42, (5875, 19))
    plain = np.loadtxt(path, delimiter=",", skiprows=1)
    np.testing.assert_allclose(inputs, np.delete(plain, [0, 4, 5], axis=1), rtol=1e-6)
    np.testing.assert_allclose(targets[:, 0], plain[:, 4], rtol=1e-6)
    own = [len(table(site, "train")) + len(table(site, "test")) for site in table.sites]
    assert (min(own), max(own), sum(own)) == (101, 168, 5875)


@needs_data
def test_the_real_speakers_are_fifteen() -> None:
    names = ["is_test", "speaker", "sex", *(f"f{k}" for k in range(10)), "vowel"]
    path = data_folder("vowel_speakers") / "vowel-context.data"
    columns = Columns(site="speaker", target="vowel", classes=True, drop=["is_test"], header=names)
    table = read_table(path, columns)
    assert (len(table.sites), len(table.classes)) == (15, 11)
    assert {len(table(site, "train")) + len(table(site, "test")) for site in table.sites} == {66}
