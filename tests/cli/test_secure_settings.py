"""A run's table `[secure]` on the command line: every command that reads it names all faults, and ends with 2."""

import pytest

from tests.cli.invoking import refused

RUN = """
task = "task.py:task"
[round]
late = "next_round"
[aggregation]
codec = "qsgd8"
[secure]
clip_norm = 1.0
"""
FAULTS = ("round.late: ", "round.cohort_size: got 2", "aggregation.codec: ", "secure.examples_max: missing")


@pytest.mark.parametrize(
    ("command", "faults"),
    [
        (["coordinator", "run.toml", "--check"], FAULTS),
        (["coordinator", "run.toml"], FAULTS),
        (["run", "start", "run.toml", "--state", "none"], FAULTS),
        (["run", "statistics", "run.toml", "--state", "none"], FAULTS),
        (["simulate", "run.toml"], FAULTS),
        (["compare", "run.toml"], FAULTS),
        (["population", "run.toml"], FAULTS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_command_names_all_faults(tmp_path, monkeypatch, command, faults):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN, "utf-8")
    found = refused(*command)
    assert len(found) == len(faults), found
    assert all(any(line.startswith(f"run.toml: {fault}") for line in found) for fault in faults), found
