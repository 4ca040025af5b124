"""`atoll settings`, `--version`, `--help`."""

import subprocess
import sys

import pytest

from atoll import Local, __version__
from tests.cli.invoking import invoke, said, shown


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
        "simulation",
    ]
    for setting in (setting for section in sections.values() for setting in section):
        assert setting.keys() == {"key", "type", "default", "doc", "is_required"}
        assert len(setting["doc"]) > 10, setting
        assert setting["type"], setting
    assert [setting["key"] for setting in sections["local"]] == [f"local.{name}" for name in Local.__slots__]


def test_one_section_is_printed_alone() -> None:
    text = said("settings", "local")
    assert "local.lr  (number; default 0.1)\n    Local learning rate" in text
    assert "round.quorum" not in text
    assert 'local.batch_size  (integer | "none"; default 32)' in text


def test_the_version_is_that_of_the_package() -> None:
    assert said("--version") == f"atoll {__version__}\n"


@pytest.mark.parametrize("command", ["", "run", "round", "client", "model", "run start", "model export"])
def test_help_explains(command: str) -> None:
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage: atoll" in result.stdout


def test_the_command_line_starts_without_torch_grpc_and_sqlalchemy() -> None:
    heavy = "torch", "numpy", "grpc", "sqlalchemy", "pydantic"
    code = f"import sys, atoll.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done
