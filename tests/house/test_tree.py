"""Reading the repository: which files, their names, their statements."""

import ast
from pathlib import Path

import pytest

from tests.house.tree import Fault, Module, dotted, read, statements


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("server/rounds/policy.py", "atoll.server.rounds.policy"),
        ("server/rounds/__init__.py", "atoll.server.rounds"),
        ("server/__init__.py", "atoll.server"),
        ("atoll/__init__.py", "atoll"),
        ("atoll/cli/main.py", "atoll.cli.main"),
        ("benchmarks/fold.py", "benchmarks.fold"),
        ("tests/server/__init__.py", "tests.server"),
    ],
)
def test_a_path_becomes_the_name_by_which_it_is_imported(path: str, name: str) -> None:
    assert dotted(path) == name


def test_links_hidden_and_generated_files_are_left_out(tmp_path: Path) -> None:
    for name in ("server/run.py", "server/a_pb2.py", "server/a_pb2_grpc.py", "server/note.txt", "atoll/cli/main.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    for folder in ("server/__pycache__", "server/.cache"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text("x = 1\n")
    (tmp_path / "atoll" / "server").symlink_to("../server")
    found = read(tmp_path, ["server", "atoll", "client"])
    assert [module.path for module in found] == ["server/run.py", "atoll/cli/main.py"]
    assert [module.room for module in found] == ["server", "atoll"]
    assert [module.folder for module in found] == ["server", "atoll/cli"]


def test_statements_are_found_at_every_depth() -> None:
    source = """
if a:
    x1 = 1
else:
    x2 = 2
try:
    x3 = 3
except E:
    x4 = 4
else:
    x5 = 5
finally:
    x6 = 6
match a:
    case 1:
        x7 = 7
class C:
    async def f():
        with a:
            for b in a:
                x8 = 8
            while a:
                x9 = 9
"""
    found = [statement for statement in statements(ast.parse(source)) if isinstance(statement, ast.Assign)]
    names = [ast.unparse(assignment.targets[0]) for assignment in found]
    assert names == [f"x{number}" for number in range(1, 10)]


def test_a_fault_names_file_and_line() -> None:
    assert str(Fault("server/run.py", 3, "is long")) == "server/run.py:3: is long"
    assert str(Fault("server", 0, "is full")) == "server: is full"


def test_lines_are_counted() -> None:
    assert Module("server/run.py", "a = 1\n\nb = 2\n").lines == 3
