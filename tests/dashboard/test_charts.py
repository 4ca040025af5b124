"""The geometry of pictures, against the values that they show."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.dashboard.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, bars, chart


def drawn(found: Chart | None) -> list[list[tuple[float, float]]]:
    """Return the points of each piece."""
    assert found is not None
    paths = (path for line in found.lines for path in line.paths)
    return [[(float(x), float(y)) for x, _, y in (p.partition(",") for p in path.split())] for path in paths]


def test_points_are_linear_in_their_values() -> None:
    (points,) = drawn(chart("loss", "version", {"server": [(0, 1.0), (5, 2.0), (10, 3.0)]}))
    xs, ys = [x for x, _ in points], [y for _, y in points]
    assert xs == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    assert ys[1] == pytest.approx((ys[0] + ys[2]) / 2, abs=0.11)
    assert TOP < ys[2] < ys[1] < ys[0] < HEIGHT - BOTTOM, "larger values are higher"


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True, width=32)), min_size=1, max_size=60)
)
def test_any_values_stay_within_the_picture(values: list[float | None]) -> None:
    found = chart("m", "round", {"s": list(enumerate(values))})
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        assert found is None
        return
    pieces = drawn(found)
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1 for one in pieces for x, y in one)
    assert found is not None
    assert found.lines[0].newest == f"{finite[-1]:.4g}"
    assert len(found.xs) > 1
    assert len(found.ys) > 1
    assert "nan" not in found.sentence


def test_a_value_that_is_missing_is_a_gap_and_a_lone_point_is_seen() -> None:
    pieces = drawn(chart("m", "round", {"s": [(1, 1.0), (2, 2.0), (3, None), (4, 1.0), (5, math.nan), (6, 2.0)]}))
    assert [len(piece) for piece in pieces] == [2, 2, 2]
    assert pieces[1][0] == pieces[1][1]


def test_equal_values_have_room() -> None:
    ((only,),) = [[piece[0]] for piece in drawn(chart("m", "round", {"s": [(7, 0.0)]}))]
    assert LEFT < only[0] < WIDTH - RIGHT
    assert TOP < only[1] < HEIGHT - BOTTOM


def test_bars_begin_and_end_where_their_clients_do() -> None:
    found = bars(
        [
            ("a", 10.0, [("wait", 0.0, 2.0), ("train", 2.0, 10.0)], "reported"),
            ("b", 20.0, [("wait", 0.0, 0.0)], "lost"),
        ],
        0.0,
        20.0,
        {"deadline": 15.0, "grace": 30.0},
    )
    wait, train = found.bars[0].parts
    assert wait.x + wait.width == pytest.approx(train.x)
    assert train.width == pytest.approx(4 * wait.width)
    assert [bar.end for bar in found.bars] == ["10.0 s", "20.0 s"]
    assert found.bars[1].parts == []
    assert [rule.text for rule in found.rules] == ["deadline"], "grace is beyond the end"
    assert found.rules[0].at == pytest.approx(wait.x + (train.x + train.width - wait.x) * 1.5)
