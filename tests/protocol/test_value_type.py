"""The value types: dataclasses like any other, whose fields mypy alone keeps from being changed."""

import pickle
from dataclasses import field, fields, replace

import pytest

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


CODE = """from atoll.server.rounds.events import StopRequested
event = StopRequested("why")
print(event.reason)
event.reason = "another"
StopRequested()
StopRequested(3)
"""
FAULTS = {4: "read-only", 5: "Missing positional argument", 6: "incompatible type"}


@pytest.mark.long
@pytest.mark.slow  # mypy checks what the events import: twelve seconds without a cache
def test_mypy_finds_a_field_that_is_changed_left_out_or_of_another_type(tmp_path):
    from mypy import api

    (tmp_path / "code.py").write_text(CODE)
    report, _, _ = api.run([str(tmp_path / "code.py")])
    *faults, summary = report.splitlines()
    assert summary == "Found 3 errors in 1 file (checked 1 source file)"
    for (line, fault), found in zip(FAULTS.items(), faults, strict=True):
        assert f"code.py:{line}: error:" in found
        assert fault in found
