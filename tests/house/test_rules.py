"""Every rule of the house finds a made-up violation, and the repository breaks none."""

import re
from pathlib import Path

import pytest

from tests.house import lines, purity, sizes
from tests.house.__main__ import faults, main
from tests.house.tree import AROUND, ROOMS, ROOT, TESTS, Fault, Module, read
from tests.house.words import turns

GOOD = {
    "server/__init__.py": '"""The process of a coordinator."""\n',
    "server/errors.py": '"""Errors of the coordinator, of `nobody`."""\n',
    "server/rounds/run.py": '"""The machine of a run."""\n\nfrom collections.abc import Mapping\nimport random\n',
    "atoll/cli/runs/show.py": '"""The command that shows a run."""\n',
    "tests/server/test_rounds.py": '"""Nobody."""\n',
    "tests/cli/runs/test_show.py": '"""Nobody."""\n',
    "docs/page.md": "# A page\n\nA round ends.\n\n```python\nnobody = 1\n```\n",
    "README.md": "A readme with `nobody` in it.\n",
}


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    return root


def faults_in(root: Path) -> list[Fault]:
    return faults(root, *(read(root, places) for places in (ROOMS, AROUND, [TESTS])))


def test_the_repository_breaks_no_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out


def test_a_house_in_order_has_no_fault(tmp_path: Path) -> None:
    assert faults_in(written(tmp_path, GOOD)) == []


LONG = '    """Do it.\n\n    In full.\n    """\n' + "    x = 1\n" * 59


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("server/long.py", f"def f():\n{LONG}    x = 1\n", "server/long.py:1: f: 61 lines"),
        ("server/long.py", f"class C:\n  def f(self):\n{LONG}    y = 2\n", "server/long.py:2: f: 61 lines"),
        ("server/long.py", f"@decorated\n@twice\ndef f():\n{LONG}", None),
        ("server/rounds/x.py", "import os\n", "server/rounds/x.py:1: os, in a pure file"),
        ("server/files/disk.py", "x = 1\n", "server/files: has no tests in tests/server/files or tests/server/test_f"),
        ("atoll/cli/x/y.py", "x = 1\n", "atoll/cli/x: has no tests in tests/cli/x or tests/cli/test_x.py"),
        ("server/services/x.py", "x = 1\n", "server/services: has no tests in tests/wire"),
        ("server/x.py", '"""The errors nobody sees."""\n', 'server/x.py:1: "nobody"'),
        ("server/x.py", 'x = 1\n"""\nThe limit: so\nmany."""\n', 'server/x.py:3: "so many": give the number'),
        ("examples/iris.py", 'def f():\n    """Draw so many irises."""\n', 'examples/iris.py:2: "so many"'),
        ("README.md", "# Atoll\n\nThe platform of whoever wants it.\n", 'README.md:3: "whoever"'),
        ("docs/deep/page.md", "~~~\nnobody\n```\n~~~\n\nNobody.\n", 'docs/deep/page.md:6: "Nobody"'),
        ("tests/x.py", '"""Nobody."""\n', None),
    ],
)
def test_a_violation_is_found(tmp_path: Path, path: str, text: str, expected: str | None) -> None:
    found = [str(fault) for fault in faults_in(written(tmp_path, GOOD | {path: text}))]
    assert len(found) == (expected is not None)
    assert all(fault.startswith(str(expected)) for fault in found)


FOLD = "aggregation/fold/streaming.py"


@pytest.mark.parametrize(
    ("path", "source", "is_fine"),
    [
        (FOLD, "import numpy\nimport torch.distributed\nfrom datetime import timedelta\nimport time", True),
        (FOLD, "import grpc.aio", False),
        (FOLD, "def f():\n    import asyncio", False),
        (FOLD, "import time\nnow = time.time()", False),
        (FOLD, "import time as clock\nnow = clock.monotonic()", False),
        (FOLD, "from time import monotonic", False),
        (FOLD, "from datetime import datetime", False),
        ("training/worker/process.py", "import time\nnow = time.monotonic()", True),
        ("training/worker/process.py", "import time\nnow = time.time()", False),
        ("protocol/wire/channel.py", "import grpc, time\nnow = time.time()", True),
        ("server/rounds/cohort_round.py", "from atoll.server.rounds.policy import StragglerPolicy", True),
        ("server/rounds/cohort_round.py", "from atoll.protocol import vocabulary", True),
        ("server/rounds/cohort_round.py", "import time", False),
        ("server/rounds/cohort_round.py", "def f():\n    from pathlib import Path", False),
        ("server/rounds/cohort_round.py", "import pydantic", False),
        ("server/rounds/cohort_round.py", "from atoll.protocol.settings import load", False),
        ("server/rounds/cohort_round.py", "from atoll.server.rounds_of_others import x", False),
        ("server/rounds/deep/run.py", "import numpy as np", False),
        ("server/rounds/policy.py", "from pydantic import BaseModel\nfrom collections.abc import Mapping", True),
        ("client/session/session.py", "from os import urandom", False),
        ("atoll/operations/load.py", "def f():\n    print(3)", False),
        ("atoll/operations/load.py", "import sys\nsys.stdout.write('3')", False),
        ("atoll/operations/training/job.py", "from rich import console", False),
        ("atoll/cli/printing.py", "import typer\nprint(3)", True),
    ],
)
def test_pure_is_pure_mathematics_has_no_shell_and_operations_are_silent(path: str, source: str, is_fine: bool) -> None:
    assert (purity.faults([Module(path, source)]) == []) == is_fine


def test_every_place_of_the_tables_has_a_file() -> None:
    assert purity.unknown_places(read(ROOT, ROOMS)) == []
    assert "server/rounds" in purity.unknown_places([Module("server/rounds.py", "")])


def test_full_folders_and_long_files_are_warnings() -> None:
    full = [Module(f"server/rounds/m{number}.py", "") for number in range(31)]
    assert sizes.warnings(full[:30]) == sizes.warnings([Module("server/a.py", "x = 1\n" * 600)]) == []
    assert [str(fault) for fault in sizes.warnings(full)] == ["server/rounds: 31 Python files, of at most 30"]
    assert [str(fault) for fault in sizes.warnings([Module("a.py", "x = 1\n" * 601)])] == [
        "a.py: 601 lines, of at most 600"
    ]


def test_the_lines_are_those_of_rooms_and_capabilities() -> None:
    table = lines.table([Module("server/journal/postgres.py", "x = 1\n" * 7), Module("server/journal/x.py", "x = 1\n")])
    now = {row[17:]: row.split()[1] for row in table.splitlines() if row}
    assert (now["server"], now["PostgreSQL"], now["journal and state directory"], now["all"]) == ("8", "7", "1", "8")


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ("A key of whosoever asks.", "whosoever"),
        ("The limit: so\n    much.", "so much"),
        ("A pause, so long as it lasts.", "so long"),
        ("Ranks that are to be asked.", "are to be"),
        ("An update that came to nothing.", "came to nothing"),
        ("The turn of what is said of it.", "what is said of"),
        ("A line in which it is said.", "it is said"),
        ("Everybody reads it.", "Everybody"),
        ("The turn of those who wait.", "those who"),
        ("A rule of a user's own.", "of a user's own"),
        ("A fault that a person mends.", "mends"),
        ("A process that ends in order.", "ends in order"),
        ("A run goes on after a restart.", "goes on"),
        ("A run that is begun anew.", "begun anew"),
        ("A digest is another one than before.", "is another one than"),
        ("The key ` alone.\n\nA file that nobody reads, `x`.", "nobody"),
    ],
)
def test_a_banned_turn_is_found(text: str, turn: str) -> None:
    ((_, found),) = turns(text)
    assert found.startswith(f'"{turn}": ')


def test_other_turns_and_code_are_let_through() -> None:
    fine = "As many as it has; so large. A caller who waits. `nobody`, ``so many``. A busybody. Also many. Amended."
    assert list(turns(fine)) == []


def test_words_lists_the_turns_of_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = written(tmp_path, GOOD | {"server/rounds/x.py": '"""So many."""\n', "docs/page.md": "Nobody.\n"})
    assert main(["--words", "server/rounds", "docs"], root) == 1
    assert capsys.readouterr().out.splitlines() == [
        'docs/page.md:1: "Nobody": name the role, or say it without a person',
        'server/rounds/x.py:1: "So many": give the number',
        "banned turns: 2",
    ]
    assert main(["--words", "README.md", "server/__init__.py"], root) == 0
    assert main(["--words", "tests/server"], root) == 1
    assert main(["--words", "server/nowhere"], root) == main(["--words", "/"], root) == 2


def test_work_leaves_the_event_loop_in_one_place() -> None:
    asked = re.compile(r"\b(run_in_executor|to_thread)\(")
    assert [module.path for module in read(ROOT, ROOMS) if asked.search(module.source)] == ["protocol/threads.py"]
