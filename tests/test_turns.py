import pytest

from tests import turns


@pytest.mark.parametrize("days", [2, 4, 7])
def test_each_cell_has_one_turn_in_so_many_days(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    due = []
    for day in range(739_949, 739_949 + days):
        monkeypatch.setattr(turns, "DAY", str(day))
        due += [number for number in range(20) if not turns.in_turn(number, number=number, days=days).marks]
    assert sorted(due) == [*range(20)]


def test_make_test_long_runs_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "DAY", "all")
    marks = [mark.name for number in range(9) for mark in turns.in_turn(number, number=number, days=4).marks]
    assert marks == ["long"] * 9


def test_each_row_and_each_column_of_a_table_has_a_cell_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    for day in range(739_949, 739_952):
        monkeypatch.setattr(turns, "DAY", str(day))
        due = [cell.values for cell in turns.table("abcde", "xyz", days=3) if not cell.marks]
        assert ({row for row, _ in due}, {column for _, column in due}) == ({*"abcde"}, {*"xyz"})
        assert len(due) == 5
