"""The settings of a training, and the recipe that follows from them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from atoll import Local
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.patience import Patience
from atoll.parallel.trainer.recipe import differences, make_recipe
from atoll.parallel.trainer.run import threads_for

LOCAL = Local(epochs=3, batch_size=16, lr=0.1, momentum=0.9, weight_decay=0.01, clip_norm=2.0)


def test_every_fault_is_said_at_once_with_its_value_and_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"train\.keep") as error:
        TrainConfig(epochs=0, keep=0, schedule="cosin", min_delta=-1.0, last="wrapped")
    faults = str(error.value).split("; ")
    assert len(faults) == 5
    assert "train.epochs: must be at least 1, or none, got 0" in faults
    assert "train.schedule: must be one of constant, linear, cosine, polynomial, wsd, got 'cosin'" in faults


def test_values_of_a_command_line_are_read_by_their_type() -> None:
    config = TrainConfig().with_overrides(
        {"epochs": "24", "end_lr": "1e-3", "asynchronous": "false", "patience": "none"}
    )
    assert (config.epochs, config.end_lr, config.asynchronous, config.patience) == (24, 1e-3, False, None)
    with pytest.raises(ValueError, match=r"train\.epoch: unknown key, got '2' .*; train\.seed: expected int, got 'x'"):
        TrainConfig().with_overrides({"epoch": "2", "seed": "x"})


def test_what_the_config_leaves_open_is_the_tasks_own() -> None:
    recipe = make_recipe(LOCAL, TrainConfig(), num_examples=100, num_ranks=2)
    assert (recipe.order.batch_size, recipe.order.num_steps, recipe.steps) == (32, 4, 12)
    assert recipe.optimizer.options == {"momentum": 0.9, "nesterov": False, "weight_decay": 0.01}
    assert not recipe.optimizer.skip_1d  # as at the sites, where torch's own optimizer decays everything
    spared = make_recipe(replace(LOCAL, decay_vectors=False), TrainConfig(), num_examples=100, num_ranks=2)
    assert spared.optimizer.skip_1d
    assert (recipe.schedule(0), recipe.schedule(11), recipe.clip_norm) == (0.1, 0.1, 2.0)


@pytest.mark.parametrize(
    ("config", "local", "steps"),
    [
        (TrainConfig(steps=5, epochs=9), LOCAL, 5),
        (TrainConfig(epochs=9), replace(LOCAL, max_steps=2), 9 * 4),
        (TrainConfig(), replace(LOCAL, max_steps=2), 2),
        (TrainConfig(batch_size=10), LOCAL, 3 * 10),
        (TrainConfig(), replace(LOCAL, batch_size=None), 3),
    ],
)
def test_the_number_of_steps(config: TrainConfig, local: Local, steps: int) -> None:
    assert make_recipe(local, config, num_examples=100, num_ranks=2).steps == steps


def test_the_rate_grows_with_the_batch_by_the_rule() -> None:
    config = TrainConfig(batch_size=64, lr_rule="linear", warmup_steps=2)
    assert make_recipe(LOCAL, config, num_examples=100, num_ranks=2).schedule(5) == pytest.approx(0.1 * 64 / 16)
    config = replace(config, lr_rule="sqrt", base_batch=4)
    assert make_recipe(LOCAL, config, num_examples=100, num_ranks=2).schedule(5) == pytest.approx(0.1 * 4)


def test_another_method_has_its_own_momentum_and_decay() -> None:
    recipe = make_recipe(LOCAL, TrainConfig(optimizer="lamb"), num_examples=100, num_ranks=1)
    assert recipe.optimizer.name == "lamb"
    assert recipe.optimizer.options["weight_decay"] == 0.01
    assert recipe.optimizer.options["betas"] == (0.9, 0.999)


def test_what_decides_the_models_does_not_know_the_ranks() -> None:
    config = TrainConfig(batch_size=32)
    one, four = (make_recipe(LOCAL, config, num_examples=100, num_ranks=n).described for n in (1, 4))
    assert differences(one, four) == []
    longer = make_recipe(LOCAL, replace(config, epochs=9), num_examples=100, num_ranks=1).described
    assert differences(one, longer) == []
    falling = replace(config, schedule="cosine")
    short, long = (
        make_recipe(LOCAL, replace(falling, epochs=n), num_examples=100, num_ranks=1).described for n in (3, 9)
    )
    assert differences(short, long) == ["train.steps was 12, now 36"]


def test_patience_counts_evaluations_that_are_not_better_by_enough() -> None:
    patience = Patience(TrainConfig(patience=2, min_delta=0.1))
    for value, waited in ((1.0, 0), (0.95, 1), (0.85, 0), (float("nan"), 1), (None, 2)):
        patience.see(value)
        assert patience.waited == waited
    assert patience.is_over
    assert patience.best == 0.85
    again = Patience(TrainConfig(patience=3))
    again.load_state(patience.state())
    assert not again.is_over
    again.see(0.86)
    assert again.is_over


def test_small_models_take_one_thread_unless_told_otherwise() -> None:
    assert threads_for(nn.Linear(10, 10), None) == 1
    assert threads_for(nn.Linear(10, 10), 3) == 3
    assert threads_for(nn.Linear(1000, 1000), None) == torch.get_num_threads()
