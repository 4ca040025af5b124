"""Tests beside their rooms, on made-up files."""

from tests.house.mirror import mirrored, missing_tests
from tests.house.tree import Module

SHIPPED = [Module(path, "") for path in ("atoll/__init__.py", "atoll/cli/runs/show.py", "server/rounds/run.py")]


def of_tests(*paths: str) -> list[Module]:
    return [Module(path, "") for path in paths]


def test_a_folder_is_mirrored_by_a_folder_or_by_a_file() -> None:
    assert mirrored("server/rounds") == ("tests/server/rounds", "tests/server/test_rounds.py")
    assert mirrored("atoll/cli/runs") == ("tests/cli/runs", "tests/cli/test_runs.py")
    assert mirrored("protocol") == ("tests/protocol", "tests/test_protocol.py")
    assert missing_tests(SHIPPED, of_tests("tests/cli/runs/deep/test_a.py", "tests/server/test_rounds.py"), {}) == []


def test_a_folder_without_tests_is_named() -> None:
    (fault,) = missing_tests(SHIPPED, of_tests("tests/cli/runs/test_show.py", "tests/server/test_run.py"), {})
    assert str(fault) == "server/rounds: has neither tests/server/rounds nor tests/server/test_rounds.py"


def test_an_exception_must_be_true_and_needed() -> None:
    tests = of_tests("tests/cli/runs/test_show.py", "tests/wire/test_round.py")
    assert missing_tests(SHIPPED, tests, {"server/rounds": "tests/wire"}) == []
    (wrong,) = missing_tests(SHIPPED, tests, {"server/rounds": "tests/wires"})
    assert str(wrong) == "server/rounds: its tests are not in tests/wires"
    (idle,) = missing_tests(SHIPPED[:2], tests, {"atoll/cli/runs": "tests/wire"})
    assert "is no exception" in str(idle)
