"""The measurements of a training: arithmetic, speed, the log, and the ranks' agreement to stop."""

import json
from pathlib import Path

import torch
from torch import nn

from atoll import Task
from atoll.parallel.data.batch import Batch
from atoll.parallel.models.decoder import Decoder, DecoderConfig
from atoll.parallel.trainer.flops import flops_per_example, peak_flops
from atoll.parallel.trainer.guard import Guard
from atoll.parallel.trainer.logs import Event, json_log, read_log, to_all
from atoll.parallel.trainer.meter import Meter
from atoll.parallel.trainer.stopping import Agreement


def test_a_decoder_costs_what_the_formula_says() -> None:
    """The formula is 6 N_matmul + 12 L h s per token."""
    config = DecoderConfig(vocab=64, dim=32, layers=3, heads=4, ffn=96, sequence=16)
    task = Task(model=lambda: Decoder(config), data=lambda _site, _split: None, loss=nn.functional.cross_entropy)
    in_matrices = 64 * 32 + 3 * (4 * 32 * 32 + 3 * 32 * 96)
    expected = 16 * (6 * in_matrices + 12 * 3 * 32 * 16)
    assert flops_per_example(task, torch.zeros(2, 16, dtype=torch.int64)) == expected


def test_a_model_that_cannot_be_counted_has_no_utilization() -> None:
    class ReadsValues(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum().item() > 0 else -x

    task = Task(model=ReadsValues, data=lambda _site, _split: None, loss=nn.functional.mse_loss)
    assert flops_per_example(task, torch.ones(1, 3)) is None
    assert peak_flops(torch.device("cpu"), "bf16") is None


def test_speed_and_time_left_leave_out_what_lies_between_the_steps() -> None:
    now = 100.0
    meter = Meter(lambda: now, steps=10, device=torch.device("cpu"), flops=50.0, peak=1000.0)
    batch = Batch(torch.zeros(4, 6), torch.zeros(4, 6, dtype=torch.int64), 24)
    for _ in range(2):
        meter.step(batch, 8)
    now += 4.0
    read = meter.read(2)
    assert (read["examples_per_s"], read["tokens_per_s"], read["mfu"]) == (4.0, 24.0, 4.0 * 50 / 1000)
    assert (read["seconds"], read["seconds_left"]) == (4.0, 16.0)
    now += 5.0  # an evaluation
    meter.resume()
    meter.step(batch, 8)
    now += 1.0
    assert meter.read(3)["examples_per_s"] == 8.0
    after = Meter(lambda: now, steps=10, device=torch.device("cpu"))
    after.load_state(meter.state())
    assert after.seconds == 10.0


def test_the_guard_names_the_first_step() -> None:
    guard = Guard(torch.device("cpu"))
    guard.see(1, torch.tensor(1.0), None)
    assert guard.first_bad_step() is None
    guard.see(2, torch.tensor(1.0), torch.tensor(float("inf")))
    guard.see(3, torch.tensor(float("nan")), torch.tensor(float("nan")))
    assert guard.first_bad_step() == 2


def test_of_several_lines_of_one_step_the_last_counts(tmp_path: Path) -> None:
    heard: list[Event] = []
    report = to_all(json_log(tmp_path / "log.jsonl"), heard.append)
    for step, loss in ((1, 3.0), (2, 2.0), (2, 2.5)):
        report({"event": "step", "step": step, "loss": loss})
    report({"event": "end", "step": 2})
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == heard
    assert {step: event["loss"] for step, event in read_log(tmp_path / "log.jsonl", "step").items()} == {1: 3.0, 2: 2.5}


def test_one_process_stops_as_soon_as_it_is_told() -> None:
    told = False
    agreement = Agreement(lambda: told, lambda: 0.0)
    assert not agreement.should_stop()
    told = True
    assert agreement.should_stop()
