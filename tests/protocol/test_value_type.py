"""The value types: dataclasses like any other, whose fields mypy alone keeps from being changed."""

import pickle
from dataclasses import field, fields, replace

import pytest
from mypy import api

from atoll.protocol.value_type import value


@value
class Point:
    x: int
    y: int = 0
    notes: dict[str, int] = field(default_factory=dict)


def test_a_value_is_what_its_fields_are():
    assert Point(1) == Point(1, 0) != Point(1, 2)
    assert replace(Point(1), y=3) == Point(1, 3)
    assert [each.name for each in fields(Point)] == ["x", "y", "notes"]
    assert pickle.loads(pickle.dumps(Point(1, 2))) == Point(1, 2)
    match Point(4, 5):
        case Point(x, y):
            assert (x, y) == (4, 5)
    with pytest.raises(AttributeError):
        Point(1).z = 1


def test_values_of_the_same_fields_are_one_in_a_set():
    @value
    class Name:
        text: str

    assert {Name("a"), Name("b"), Name("a")} == {Name("b"), Name("a")}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("event.reason = 'another'", "read-only"),
        ("StopRequested()", "Missing positional argument"),
        ("StopRequested(3)", "incompatible type"),
        ("print(event.reason)", ""),
    ],
)
def test_mypy_sees_who_changes_one(tmp_path, line, fault):
    code = f"from atoll.server.rounds.events import StopRequested\nevent = StopRequested('why')\n{line}\n"
    (tmp_path / "code.py").write_text(code)
    told, _, status = api.run([str(tmp_path / "code.py")])
    assert fault in told
    assert status == bool(fault), told
