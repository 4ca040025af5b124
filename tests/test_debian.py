"""The list of Debian's packages that tests need."""

import re
from pathlib import Path

import pytest

from tests.debian import PACKAGES, missing

TESTS = Path(__file__).parent
LISTED = (TESTS.parent / "CONTRIBUTING.md").read_text("utf-8").partition("| packages | for |\n|---|---|\n")[2]


def test_contributing_lists_each_package() -> None:
    rows = [line.split("|")[1] for line in LISTED.partition("\n\n")[0].splitlines()]
    assert {name for row in rows for name in re.findall("`([^`]+)`", row)} == set(PACKAGES.values())


def test_a_lacking_program_is_named_by_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "promtool").write_text("#!/bin/sh\n")
    (tmp_path / "promtool").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing("promtool") == ""
    assert missing("slurmd", "promtool", "munged") == "missing here: apt-get install munge slurmd"


def test_no_other_test_decides_by_itself_that_a_program_is_missing() -> None:
    """A skip whose reason names no package sends a reader away with nothing to do."""
    skips = re.compile(r"skipif\([^)]*which\(")
    others = [path for path in TESTS.rglob("*.py") if path.name != "debian.py"]
    assert [str(path) for path in others if skips.search(path.read_text("utf-8"))] == []
