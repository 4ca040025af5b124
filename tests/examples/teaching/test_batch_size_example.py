"""The sweep of the batch size, with a model that learns in milliseconds where the trained numbers do not matter."""

import json
import math
import sys
from functools import cache
from typing import Any

import pytest
from torch import nn

from atoll.training.optimizers.options import OPTIONS
from tests.later import later

batch_size = later("examples.batch_size")


@cache
def quick() -> Any:
    return batch_size.Sweep(
        optimizer="sgd",
        batches=(32, 128),
        target=0.5,
        rule="tuned",
        base_batch=32,
        max_epochs=6,
        max_steps=60,
        seeds=1,
        train_loss=1.0,
    )


def small_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def command(monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    monkeypatch.setattr("examples.digits.make_model", small_model)
    monkeypatch.setattr(sys, "argv", ["batch_size", *options.split()])
    batch_size.main()


@pytest.mark.slow
def test_the_command_measures_a_sweep_and_ends_with_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, "--batches 16,64,256 --target 0.8 --max-steps 200 --train-loss 0.5")
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result["examples"] == 1299
    assert [row["batch"] for row in result["rows"]] == [16, 64, 256]
    for row in result["rows"]:
        assert row["lr"] in quick().grid
        assert row["examples"] == row["batch"] * row["steps"]
    assert result["rows"][0]["steps"] > result["rows"][1]["steps"]  # a batch of 16 is far below the critical one
    assert result["noise_scale"]["all"] > 0
    for one in result["minima"]:
        assert one["train_loss"] <= 0.5
        assert 0 < one["sharpness"][1] < one["sharpness"][0]
    for heading in ("batch  lr", "critical batch: ", "gradient noise scale", "sharpness(0.001)"):
        assert heading in printed


@pytest.mark.slow
def test_a_rule_takes_every_rate_from_the_base_batch_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(
        monkeypatch, "--batches 64,256 --target 0.6 --max-steps 100 --train-loss 1 --rule sqrt --base-batch 64 --json"
    )
    [line] = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    small, large = result["rows"]
    assert large["lr"] == pytest.approx(2 * small["lr"])
    assert "at least three batches" in result["critical"]["why"]
    assert [one["batch"] for one in result["minima"]] == [64, 256, 256]


@pytest.mark.parametrize("options", ["--batches 8,many", "--batches 0,8", "--seeds 0", "--rule cubic"])
def test_what_cannot_be_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(monkeypatch, options)
    assert options.split()[0] in capsys.readouterr().err


def test_a_batch_larger_than_the_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="2000 is more than the 1299 training examples"):
        command(monkeypatch, "--batches 2000")


def test_the_best_rate_is_found_and_hopeless_runs_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of steps is least at 0.08; rates above 0.16 diverge."""
    limits: list[int] = []

    def steps(data: object, sweep: object, batch: int, lr: float, seed: int, limit: int) -> int | None:
        limits.append(limit)
        needed = int(20 + 10 * abs(math.log2(lr / 0.08)))
        return None if lr > 0.16 or needed > limit else needed

    monkeypatch.setattr("examples.batch_size.steps_to_target", steps)
    data = batch_size.load()
    for rates in (quick().grid, quick().grid[::-1]):
        limits.clear()
        assert batch_size.best(data, quick(), 32, rates) == batch_size.Row(32, 0.08, 20, 640, 640 / 1299)
        assert limits == sorted(limits, reverse=True)
        assert limits[0] == 60


def test_a_batch_that_no_rate_brings_to_the_target_has_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.batch_size.steps_to_target", lambda *arguments: None)
    assert batch_size.best(batch_size.load(), quick(), 32, quick().grid) == batch_size.Row(32, None, None, None, None)


@pytest.mark.slow
def test_every_optimizer_can_be_swept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert batch_size.LIKELY.keys() == OPTIONS.keys()
    command(monkeypatch, "--batches 128 --target 0.6 --max-steps 100 --optimizer lars --json")
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["steps"] is not None
