"""Sizes of made-up files and functions."""

import ast

import pytest

from tests.house.sizes import (
    commands_by_call,
    full_folders,
    lines_of,
    long_files,
    long_functions,
    parameters_of,
    wide_functions,
)
from tests.house.tree import Function, Module


def function(source: str) -> Function:
    found = ast.parse(source).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


def of_length(lines: int, doc: str = "") -> str:
    return "def f():\n" + doc + "    x = 1\n" * (lines - 1)


def test_a_full_folder_is_reported() -> None:
    full = [Module(f"server/rounds/m{number}.py", "") for number in range(31)]
    assert full_folders(full[:30]) == []
    assert full_folders([*full[:30], Module("server/other.py", ""), Module("server/rounds/deep/x.py", "")]) == []
    assert [str(fault) for fault in full_folders(full)] == ["server/rounds: 31 Python files"]


def test_a_long_file_is_reported_longest_first() -> None:
    modules = [Module(f"server/m{lines}.py", "x = 1\n" * lines) for lines in (600, 601, 602)]
    assert [str(fault) for fault in long_files(modules)] == ["server/m602.py: 602 lines", "server/m601.py: 601 lines"]


def test_lines_are_those_of_the_body_without_the_docstring() -> None:
    assert (
        lines_of(function('@decorated\n@twice\ndef f():\n    """One.\n\n    Two.\n    """\n    x = 1\n    y = 2')) == 3
    )
    assert lines_of(function('def f():\n    """Only this."""')) == 2
    assert lines_of(function("def f():\n    x = 1")) == 2


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (of_length(60), []),
        (of_length(60, '    """A.\n\n    B.\n    """\n'), []),
        (of_length(61), ["server/run.py:1: f: 61 lines"]),
        (
            "class C:\n" + "".join(f"    {line}\n" for line in of_length(61).splitlines()),
            ["server/run.py:2: f: 61 lines"],
        ),
    ],
)
def test_a_long_function_is_reported(source: str, expected: list[str]) -> None:
    assert [str(fault) for fault in long_functions([Module("server/run.py", source)])] == expected


@pytest.mark.parametrize(
    ("signature", "count"),
    [
        ("", 0),
        ("a, b=1, /, c=2, *, d, e=3", 5),
        ("a, *args, b, **kwargs", 4),
        ("self, a", 1),
        ("cls, *, a", 1),
        ("self, /, a", 1),
        ("a, self", 2),
    ],
)
def test_parameters_are_counted_without_self(signature: str, count: int) -> None:
    assert parameters_of(function(f"def f({signature}): ...")) == count


EIGHT = "a, b, c, d, e, f, g, h"


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("server/run.py", f"def f({EIGHT}): ...", []),
        ("server/run.py", f"class C:\n    def f(self, {EIGHT}): ...", []),
        ("server/run.py", f"def f({EIGHT}, i): ...", ["server/run.py:1: f: 9 parameters"]),
        ("server/run.py", f"def f({EIGHT}, *, i=0): ...", ["server/run.py:1: f: 9 parameters"]),
        ("server/run.py", f"def g():\n    async def f({EIGHT}, *i): ...", ["server/run.py:2: f: 9 parameters"]),
        ("atoll/cli/run.py", f"@app.command('list')\ndef f({EIGHT}, i): ...", []),
        ("atoll/cli/run.py", f"@app.callback()\ndef f({EIGHT}, i): ...", ["atoll/cli/run.py:2: f: 9 parameters"]),
        ("atoll/cli/run.py", f"def f({EIGHT}, i): ...\napp.command()(f)", []),
        ("atoll/cli/run.py", f"def f({EIGHT}, i): ...\nother()(f)", ["atoll/cli/run.py:1: f: 9 parameters"]),
        ("server/run.py", f"@app.command()\ndef f({EIGHT}, i): ...", ["server/run.py:2: f: 9 parameters"]),
        ("server/run.py", f"def f({EIGHT}, i): ...\napp.command()(f)", ["server/run.py:1: f: 9 parameters"]),
    ],
)
def test_a_wide_function_is_reported_unless_it_is_a_command(path: str, source: str, expected: list[str]) -> None:
    assert [str(fault) for fault in wide_functions([Module(path, source)])] == expected


def test_a_command_is_known_where_another_file_registers_it() -> None:
    main = Module("atoll/cli/main.py", "from atoll.cli.agent import agent as run_agent\napp.command()(run_agent)")
    assert commands_by_call([main]) == {("atoll.cli.agent", "agent")}
    agent = Module("atoll/cli/agent.py", f"def agent({EIGHT}, i): ...\ndef other({EIGHT}, i): ...")
    assert [fault.text for fault in wide_functions([main, agent])] == ["other: 9 parameters"]
