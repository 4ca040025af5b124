"""The command, on made-up repositories."""

from pathlib import Path

import pytest

from tests.house.__main__ import main
from tests.house.upward import House

HOUSE = House({"server": (("errors.py",), ("rounds",))}, {"server": {"server"}}, {})
GOOD = {
    "server/__init__.py": '"""The process of a coordinator."""\n',
    "server/errors.py": '"""Errors of the coordinator."""\n',
    "server/rounds/__init__.py": '"""The pure rules of a round."""\n',
    "server/rounds/run.py": '"""The machine of a run."""\n\nimport atoll.server.errors\n',
    "tests/test_server.py": '"""Nobody."""\n',
    "tests/server/test_rounds.py": '"""Nobody."""\n',
    "docs/page.md": "# A page\n\nA round ends.\n",
    "README.md": "A readme with `nobody` in it.\n",
}


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    return root


def test_a_house_in_order_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], written(tmp_path, GOOD), HOUSE) == 0
    out = capsys.readouterr().out
    assert "NOT OK" not in out
    assert "Nobody" not in out
    assert ["longest", "file", "3", "600", "ok"] in [line.split() for line in out.splitlines()]


NINE = ", ".join("abcdefghi")


@pytest.mark.parametrize(
    ("name", "text", "expected", "check"),
    [
        (
            "server/rounds/long.py",
            '"""A long file."""\n' + "x = 1\n" * 600,
            "server/rounds/long.py: 601 lines",
            "longest",
        ),
        (
            "server/rounds/f.py",
            '"""A function\'s file."""\n\n\ndef f():\n' + "    x = 1\n" * 60,
            "server/rounds/f.py:4: f: 61 lines",
            "functions over",
        ),
        (
            "server/rounds/f.py",
            f'"""A function\'s file."""\n\n\ndef f({NINE}): ...\n',
            "server/rounds/f.py:4: f: 9 parameters",
            "functions with more",
        ),
        (
            "server/errors.py",
            '"""Errors of the coordinator."""\n\nimport atoll.server.rounds.run\n',
            "server/errors.py:3: imports server/rounds/run.py",
            "import circles between modules",
        ),
        (
            "server/errors.py",
            '"""Errors of the coordinator."""\n\nimport atoll.server.rounds.run\n',
            "server/errors.py:3: imports server/rounds/run.py; server/rounds/run.py:3 imports server/errors.py",
            "import circles between folders",
        ),
        (
            "server/errors.py",
            '"""Errors of the coordinator."""\n\nimport atoll.server.rounds\n',
            "server/errors.py:3: imports server/rounds/__init__.py: server/rounds is on floor 1",
            "upward",
        ),
        ("server/new.py", '"""A new file there."""\n', "server/new.py: is missing", "places"),
        ("server/errors.py", '"""The errors nobody sees."""\n', 'server/errors.py:1: "nobody"', "banned turns in doc"),
        ("examples/iris.py", '"""So many irises."""\n', 'examples/iris.py:1: "So many"', "banned turns in doc"),
        (
            "README.md",
            "# Atoll\n\nThe platform of whoever wants it.\n",
            'README.md:3: "whoever"',
            "banned turns in the",
        ),
        ("server/files/disk.py", '"""The disk of a server."""\n', "server/files: has neither", "folders without tests"),
        ("CONTRIBUTING.md", "So many.\n", 'CONTRIBUTING.md:1: "So many"', "banned turns in the"),
    ],
)
def test_one_fault_breaks_its_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, expected: str, check: str
) -> None:
    assert main([], written(tmp_path, GOOD | {name: text}), HOUSE) == 1
    out = capsys.readouterr().out
    assert f"  {expected}" in out
    assert [line for line in out.splitlines() if line.startswith(check) and line.endswith("NOT OK")]


@pytest.mark.parametrize("folder", ["server/rounds", "tests"])
def test_a_full_folder_breaks_its_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str) -> None:
    full = {f"{folder}/m{number}.py": f'"""Module number {number} of them."""\n' for number in range(31)}
    assert main([], written(tmp_path, GOOD | full), HOUSE) == 1
    assert f"  {folder}: {32 if folder == 'tests' else 33} Python files" in capsys.readouterr().out


def test_the_first_faults_are_listed_and_all_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = written(tmp_path, GOOD | {"server/errors.py": "".join(f'x{n} = 1\n"""So many, {n}."""\n' for n in range(9))})
    assert main([], root, HOUSE) == 1
    out = capsys.readouterr().out
    assert out.count("attribute x") == 5
    assert "and 4 more; all of them: --words" in out
    assert "in all: server 9" in out
    assert main(["--full"], root, HOUSE) == 1
    assert capsys.readouterr().out.count("attribute x") == 9


def test_the_style_of_tests_is_for_information(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--all"], written(tmp_path, GOOD), HOUSE) == 0
    out = capsys.readouterr().out
    assert 'tests/test_server.py:1: "Nobody": name the role' in out


def test_words_lists_the_style_of_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = '"""So many."""\n'
    root = written(
        tmp_path, GOOD | {"server/rounds/run.py": many, "docs/page.md": "Nobody.\n", "server/errors.py": many}
    )
    assert main(["--words", "server/rounds", "docs"], root, HOUSE) == 1
    assert capsys.readouterr().out.splitlines() == [
        'docs/page.md:1: "Nobody": name the role, or say it without a person',
        'server/rounds/run.py:1: "So many": give the number',
        "2 in 2 Python files and 1 page",
    ]
    assert main(["--words", "README.md", "server/__init__.py"], root, HOUSE) == 0
    assert capsys.readouterr().out == "0 in 1 Python file and 1 page\n"
    assert main(["--words"], root, HOUSE) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "3 in 4 Python files and 2 pages"
    assert main(["--words", "tests/test_server.py"], root, HOUSE) == 1


def test_words_of_a_path_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = written(tmp_path, GOOD)
    for path in ("server/nowhere", "/"):
        assert main(["--words", path], root, HOUSE) == 2
        assert "no such file or folder of the repository" in capsys.readouterr().err


def test_a_proposal_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--propose", "server"], written(tmp_path, GOOD), HOUSE) == 0
    assert capsys.readouterr().out.splitlines() == [
        '    "server": (',
        '        ("errors.py",),',
        '        ("rounds",),',
        "    ),",
    ]
