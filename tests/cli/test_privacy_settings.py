"""A run's table `[privacy]` on the command line: every command that reads it names all faults, and ends with 2."""

import pytest

from tests.cli.invoking import refused

RUN = """
task = "task.py:task"
[round]
cohort_size = 10
late = "next_round"
[cohort]
sampler = "oort"
[aggregation]
rule = "median"
[evaluation]
clients_every = 1
[privacy]
epsilon = 8.0
delta = 0.1
clip_norm = 1.0
"""
FAULTS = (
    'round.late: got "next_round"',
    'cohort.sampler: got "oort"',
    'aggregation.rule: got "median"',
    'aggregation.weighting: got "examples"',
    "evaluation.clients_every: got 1",
    "privacy.delta: got 0.1",
)
START = ["run", "start", "run.toml", "--state", "none", "--set"]


@pytest.mark.parametrize(
    ("command", "faults"),
    [
        (["coordinator", "run.toml", "--check"], FAULTS),
        (["coordinator", "run.toml"], FAULTS),
        (["run", "start", "run.toml", "--state", "none"], FAULTS),
        ([*START, "privacy.epsilon=0", "--set", "privacy.clip_norm=nan"], ("privacy.epsilon", "privacy.clip_norm")),
        ([*START, "privacy.noise_multiplier=0.1"], (*FAULTS, "privacy.noise_multiplier: got 0.1")),
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
    assert all(any(f": {fault}" in line for line in found) for fault in faults), found


def test_a_sweep_names_the_faults_of_its_cells_before_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.toml").write_text(RUN + '[grid]\n"privacy.epsilon" = [1.0, 8.0]\n', "utf-8")
    found = refused("sweep", "sweep.toml")
    assert all(any(fault in line for line in found) for fault in FAULTS), found
    assert not (tmp_path / "atoll-sweep-sweep").exists()
