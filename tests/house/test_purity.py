"""Purity by folder, in a made-up house."""

import pytest

from tests.house.purity import PURE, Purity, absent_places, impure_imports
from tests.house.tree import ROOMS, Module

PURITY = Purity(
    pure={
        "server/rounds": frozenset(),
        "server/rounds/policy.py": frozenset({"pydantic"}),
        "client/session.py": frozenset(),
    },
    exempt=frozenset({"server/rounds/files.py"}),
    stdlib=frozenset({"collections", "random"}),
)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("server/rounds/run.py", "import time"),
        ("server/rounds/run.py", "def f():\n    from pathlib import Path"),
        ("server/rounds/run.py", "import pydantic"),
        ("server/rounds/deep/run.py", "import asyncio"),
        ("server/rounds/run.py", "from atoll.server.journal import journal"),
        ("server/rounds/run.py", "from atoll.server.rounds.files import read"),
        ("server/rounds/run.py", "from atoll.server.rounds import files"),
        ("server/rounds/run.py", "from atoll.server.rounds_of_others import x"),
        ("client/session.py", "from os import urandom"),
    ],
)
def test_an_impure_import_is_reported(path: str, source: str) -> None:
    (fault,) = impure_imports(PURITY, [Module(path, source)])
    assert fault.path == path
    assert fault.line == source.count("\n") + 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("server/rounds/run.py", "from collections.abc import Mapping\nimport random"),
        ("server/rounds/run.py", "from atoll.server.rounds import policy\nfrom atoll.client.session import Session"),
        ("server/rounds/policy.py", "from pydantic import BaseModel\nimport collections"),
        ("server/rounds/files.py", "import os"),
        ("server/journal/journal.py", "import os"),
        ("server/rounds_of_others.py", "import os"),
    ],
)
def test_what_is_allowed_is_let_through(path: str, source: str) -> None:
    assert impure_imports(PURITY, [Module(path, source)]) == []


def test_entries_without_a_file_are_found() -> None:
    assert absent_places(PURITY, ["server/rounds/policy.py", "client/session.py"]) == ["server/rounds/files.py"]
    assert absent_places(PURITY, ["client/session.py", "server/rounds/files.py"]) == ["server/rounds/policy.py"]


def test_the_table_is_of_shipped_code() -> None:
    assert {place.split("/")[0] for place in PURE} <= set(ROOMS)
