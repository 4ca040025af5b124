"""`atoll settings`, `--version`, `--help`."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import atoll
from atoll import Local, __version__
from atoll.protocol.build import build_of
from tests.cli.invoking import invoke, said, shown
from tests.waiting import BOUND_S


def test_every_setting_is_printed_with_type_default_and_text() -> None:
    sections = shown("settings")
    assert list(sections) == [
        "run",
        "coordinator",
        "aggregator",
        "agent",
        "policy",
        "local",
        "train",
        "plan",
        "privacy",
        "simulation",
    ]
    for setting in (setting for section in sections.values() for setting in section):
        assert setting.keys() == {"key", "type", "default", "doc", "is_required"}
        assert len(setting["doc"]) > 10, setting
        assert setting["type"], setting
    assert [setting["key"] for setting in sections["local"]] == [f"local.{name}" for name in Local.__slots__]


def test_one_section_is_printed_alone() -> None:
    text = said("settings", "local")
    assert "local.lr  (number; default 0.1)\n    The local learning rate" in text
    assert "round.quorum" not in text
    assert 'local.batch_size  (integer | "none"; default 32)' in text


def test_the_version_is_that_of_the_package() -> None:
    """And its build is that of the sources, wherever they lie."""
    assert said("--version") == f"atoll {__version__} build {build_of(Path(atoll.__file__).parent)}\n"


@pytest.mark.parametrize("command", ["", "run", "round", "client", "model", "run start", "model export"])
def test_help_explains(command: str) -> None:
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage: atoll" in result.stdout


@pytest.mark.parametrize("command", ["simulate", "agent", "run start", "compare"])
def test_no_line_of_the_help_ends_before_the_next_word_would_not_fit(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    lines = [line.strip() for line in said(*command.split(), "--help").split("\u256d")[0].splitlines()]
    early = [line for line, after in pairwise(lines) if line and after and len(f"{line} {after.split()[0]}") < 78]
    assert early == []


@pytest.mark.real
def test_the_command_line_starts_without_torch_grpc_and_sqlalchemy() -> None:
    heavy = "torch", "numpy", "grpc", "sqlalchemy", "pydantic"
    code = f"import sys, atoll.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S)
    assert done.stdout == "[]\n", done


@pytest.mark.parametrize("command", ["agent", "aggregator", "coordinator", "join", "run list", "authority serve"])
@pytest.mark.parametrize("own", ["", "DEBUG"])
def test_no_command_lets_grpc_s_core_write_lines_of_its_own_unless_asked_to(
    command: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", own)
    if not own:
        del os.environ["GRPC_VERBOSITY"]
    assert invoke(*command.split(), "--no-such-option").exit_code == 2
    assert os.environ["GRPC_VERBOSITY"] == (own or "NONE")
