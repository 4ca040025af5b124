"""`atoll train` with example-level privacy: what it refuses, all at once, and the guarantee that it prints."""

import json
from pathlib import Path

import pytest

from atoll.protocol.privacy import loss_distribution
from tests.cli.invoking import refused, said, shown

TASKS = Path(__file__).parents[2] / "parallel" / "trainer" / "tasks.py"
TASK = f"{TASKS}:task"
SOUND = {"unit": "example", "sample_rate": "0.1", "clip_norm": "1", "delta": "1e-4", "noise_multiplier": "1"}


@pytest.fixture(autouse=True)
def _built_in_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Account by the built-in bound, which takes no seconds."""
    monkeypatch.setattr(loss_distribution, "is_installed", lambda: False)


def options(**changed: str) -> list[str]:
    return [part for name, value in {**SOUND, **changed}.items() for part in ("--set", f"privacy.{name}={value}")]


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        (
            options(epsilon="-1", delta="1", sample_rate="2"),
            ["privacy.epsilon", "privacy.delta", "privacy.sample_rate"],
        ),
        (["--set", "privacy.epsilon=8"], ["privacy.epsilon: got 8.0: without privacy.unit"]),
        (options(unit="client"), ['privacy.unit: got "client", which is for a federation']),
        (
            [*options(), "--nproc", "2", "--set", "train.batch_size=8", "--mesh", "pp=2"],
            ["--mesh: got pp=2: a pipeline knows no norm of a whole gradient", "train.batch_size: got 8"],
        ),
        (
            [*options(noise_multiplier="0.5", epsilon="8"), "--steps", "300"],
            ["privacy.epsilon: 8 at delta 0.0001 is spent after", "of 300 steps with privacy.noise_multiplier 0.5"],
        ),
        ([*options(epsilon="1e-9", noise_multiplier="none")], ["privacy.epsilon: no noise multiplier up to 1e+06"]),
        ([*options(), "--set", "privacy.radius=1"], ["privacy.radius: unknown key"]),
        ([*options(delta="0.5")], ["privacy.delta: got 0.5 with 52 training examples"]),
    ],
)
def test_faults_are_reported_at_once(tmp_path: Path, arguments: list[str], faults: list[str]) -> None:
    found = "\n".join(refused("train", TASK, "--out", str(tmp_path / "out"), *arguments))
    for words in faults:
        assert words in found


def test_the_guarantee_is_printed_whole_and_is_in_the_result(tmp_path: Path) -> None:
    out = tmp_path / "out"
    budget = options(epsilon="8", noise_multiplier="none")
    text = said("train", TASK, "--steps", "6", "--out", str(out), *budget)
    for words in (
        "at delta 0.0001 for one example: adjacent are runs in one of which",
        "6 steps, in each of which every example takes part with probability 0.1",
        "Not covered:",
        "This training alone",
    ):
        assert words in text
    found = json.loads((out / "result.json").read_text())["privacy"]
    assert found["steps"] == 6
    assert 7.99 < found["epsilon"] <= 8.0 == found["epsilon_max"]
    assert found["sentence"] in text
    assert shown("train", TASK, "--steps", "6", "--out", str(out), *budget)["privacy"] == found
    (other,) = refused(
        "train", TASK, "--steps", "6", "--out", str(out), *options(clip_norm="2", noise_multiplier="1.5")
    )
    assert "6 steps of another mechanism" in other
