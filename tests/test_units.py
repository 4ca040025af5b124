"""The systemd units of docs/systemd: what they start takes its settings, and systemd takes them."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from atoll.protocol.signals import ExitCode
from tests.cli.invoking import TINY, said
from tests.debian import needs
from tests.waiting import BOUND_S

UNITS = sorted((Path(__file__).parents[1] / "docs" / "systemd").glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")
HARDENED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "KillSignal": "SIGTERM",
    "KillMode": "mixed",
    "Restart": "on-failure",
    "Type": "notify",
    "NotifyAccess": "main",
    "StateDirectoryMode": "0700",
}
SERVICES = [unit for unit in UNITS if unit.stem != "atoll-dashboard"]
"""Units of services, whose log survives a rotation and whose settings `--check` prints."""


FILES = {
    "atoll-coordinator": {},
    "atoll-agent": {
        "task.py": TINY.read_text().replace('"a", "b"', '"north", "b"'),
        "agent.toml": "threads = 3",
        "policy.toml": 'tasks = ["*"]\nruns = ["*"]',
    },
}
"""What a unit's header says to lie in its working directory."""
SHOWN = {
    "atoll-coordinator": ('listen = "0.0.0.0:7070"', 'public = "fl.example.org"', 'state = "{}/atoll"'),
    "atoll-agent": ('policy = "policy.toml"', "threads = 3", 'site = "north"', 'state = "{}/atoll-agent"'),
}
"""What `--check` prints then; {} is the folder of all state directories, which systemd calls %S."""


def settings(unit):
    text = unit.read_text().replace("\\\n", "")
    lines = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key: value for key, _, value in lines}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_is_hardened_and_its_command_knows_every_option(unit):
    found = settings(unit)
    assert {key: found.get(key) for key in HARDENED} == HARDENED
    assert int(found["TimeoutStopSec"]) >= 30
    _, command, *arguments = shlex.split(found["ExecStart"])
    help_ = said(command, "--help")
    options = [argument for argument in arguments if argument.startswith("--")]
    assert options
    assert all(option in help_ for option in options)
    assert f" %S/{found['StateDirectory']} " in found["ExecStart"], "nothing else may be written to"


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.stem)
def test_a_service_is_told_of_a_rotated_log(unit):
    assert settings(unit)["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_a_dashboard_leaves_the_key_of_its_links_in_the_folder_that_systemd_makes():
    [unit] = [each for each in UNITS if each not in SERVICES]
    found = settings(unit)
    assert found["Environment"] == f"XDG_RUNTIME_DIR=%t/{found['RuntimeDirectory']}"
    assert f"XDG_RUNTIME_DIR=/run/{found['RuntimeDirectory']}" in unit.read_text().partition("[Unit]")[0]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_again_until_disk_database_or_data_are_back(unit):
    found = settings(unit)
    never_again = found["RestartPreventExitStatus"].split()
    repeating = {ExitCode.FAILED, ExitCode.OPERATOR} if unit.stem == "atoll-coordinator" else {ExitCode.OPERATOR}
    assert {str(code) for code in repeating} == set(never_again)
    assert str(ExitCode.AWAY) not in never_again
    assert found["StartLimitIntervalSec"] == "0", "systemd gives up after so many starts otherwise"


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.stem)
def test_a_unit_s_command_starts_as_it_is_written(unit, tmp_path, monkeypatch):
    _, *arguments = shlex.split(settings(unit)["ExecStart"].replace("%S", str(tmp_path / "state")))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name, text in FILES[unit.stem].items():
        assert name in unit.read_text().partition("[Unit]")[0], "the header names what is needed"
        Path(name).write_text(text)
    effective = said(*arguments, "--check")
    for line in SHOWN[unit.stem]:
        assert line.format(tmp_path / "state") in effective


@pytest.mark.real
@needs("systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_a_unit(unit, tmp_path):
    assert ANALYZE is not None
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/atoll/bin/atoll", "/bin/true").replace("WorkingDirectory=", "#"))
    done = subprocess.run([ANALYZE, "verify", "--man=no", copy], capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr, done.stderr
