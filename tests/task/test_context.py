"""The context of a task's functions."""

import pickle
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import pytest
import torch

from atoll import Context, Metric, Task
from atoll.task.array_values import tuned
from atoll.task.context import context_of, depends_on_context, takes_context, within
from atoll.task.overrides import OverridesRefused
from atoll.task.randomness import data_of, server_data_of


def loss(outputs, targets, context):
    return context.options["rate"], context.site, context.round


def model(context):
    return torch.nn.Linear(context.options["width"], 1)


def data(site, split, context):
    return [(site, split, context.site, context.settings["file"], context.options["rate"])]


def test_data(context):
    return [(context.site, context.options["rate"])]


def count(outputs, targets, context):
    return context.round, 1


test_data.__test__ = False
TASK = Task(
    model=model,
    data=data,
    loss=loss,
    sites=["north"],
    test_data=test_data,
    metrics={"count": count, "same": Metric(statistics=count, value=sum)},
    options={"rate": 0.5, "width": 3},
    settings={"file": "default.csv"},
)


def test_functions_get_the_context_of_their_call():
    with within(context_of(TASK, site="north", round=7)):
        assert TASK.loss(None, None) == (0.5, "north", 7)
        assert TASK.metrics["count"](None, None) == (7, 1)
        assert TASK.metrics["same"].statistics(None, None) == (7, 1)
    assert TASK.loss(None, None) == (0.5, None, 0)
    assert depends_on_context(TASK)


def test_data_and_model_get_options_and_settings_whatever_is_trained_meanwhile():
    tuned_task = tuned(TASK, {"rate": 2, "width": 4}, {"north": {"file": "mine.csv"}})
    with within(context_of(tuned_task, site="south", round=7)):
        assert data_of(tuned_task, "north", "train") == [("north", "train", "north", "mine.csv", 2.0)]
        assert server_data_of(tuned_task) == [(None, 2.0)]
    assert tuned_task.model().in_features == 4
    assert TASK.model().in_features == 3  # the first task is as before


def test_a_changed_copy_keeps_the_values_and_a_function_without_context_stays_itself():
    copied = replace(tuned(TASK, {"rate": 2.0}), sites=["a"])
    assert copied.loss(None, None)[0] == 2.0
    plain = replace(TASK, loss=torch.nn.functional.mse_loss, metrics={})
    assert plain.loss is torch.nn.functional.mse_loss
    assert not depends_on_context(plain)


def test_a_task_with_context_travels_between_processes():
    again = pickle.loads(pickle.dumps(tuned(TASK, {"rate": 3.0})))
    assert again.loss(None, None)[0] == 3.0


def test_only_a_parameter_of_that_name_takes_it():
    assert takes_context(loss)
    assert takes_context(partial(loss, targets=None))
    assert not takes_context(partial(loss, context=Context()))
    assert not takes_context(torch.nn.CrossEntropyLoss())
    assert not takes_context(max)
    assert not takes_context("loss")


def test_rows_are_collated_with_a_context_too():
    rows = Task(
        model=model, data=data, loss=loss, collate=lambda rows: rows, settings={"file": "x"}, options={"rate": 1.0}
    )
    found = data_of(rows, "north", "train")
    assert (found.collate([1]), found[0][2]) == ([1], "north")
    assert data_of(replace(rows, settings={"file": "y"}), "north", "train")[0][3] == "y"


def test_undeclared_values_are_refused():
    with pytest.raises(OverridesRefused, match=r"task.rat: unknown key, got 1 \(known, from Task\(options=...\): rate"):
        tuned(TASK, {"rat": 1})
    with pytest.raises(ValueError, match="options: 'a b' must be a name with a number"):
        Task(model=model, data=data, loss=loss, options={"a b": [1]})


class Counter:
    sites = ("north",)
    options = MappingProxyType({"rate": 0.5})

    def initial(self, seed, context):
        return context.options["rate"]

    def train(self, parameters, instructions):
        return instructions

    def num_examples(self, site, context):
        return context.site, context.options["rate"]


def test_an_array_task_gets_the_same_context():
    task = tuned(Counter(), {"rate": 2})
    assert task.initial(0) == 2.0
    with within(context_of(task, site="north")):
        assert task.num_examples("north") == ("north", 2.0)
    assert pickle.loads(pickle.dumps(task)).initial(0) == 2.0
    assert task.sites == ("north",)
