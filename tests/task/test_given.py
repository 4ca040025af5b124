"""The values that a run gives to its task."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from atoll import Deadline, Local, Task, Trained
from atoll.task.array_values import tuned
from atoll.task.given import Given, with_values
from atoll.task.overrides import OverridesRefused
from atoll.training.worker.array_bench import ArrayBench
from atoll.training.worker.bench import Received

TABLE = {
    "epochs": 2,
    "lr": {"kind": "exponential", "factor": 0.5},
    "task.smoothing": 0.1,
}


def test_a_table_has_overrides_schedules_and_options():
    given = Given.read(json.loads(json.dumps(TABLE)))
    assert (given.local, given.options) == ({"epochs": 2}, {"smoothing": 0.1})
    local = Local(lr=0.8)
    assert [given.local_of(local, round_).lr for round_ in (1, 2, 3)] == [0.8, 0.4, 0.2]
    assert given.local_of(local, 3).epochs == 2


def test_a_schedule_starts_from_the_runs_value_or_the_tasks():
    table = {"lr": {"kind": "exponential", "factor": 0.5, "start": 0.2}}
    assert Given.read(table).local_of(Local(lr=0.8), 2).lr == 0.1


def test_whole_numbers_are_rounded():
    given = Given.read({"batch_size": {"kind": "step", "factor": 1.5, "every": 1, "start": 10}})
    assert [given.local_of(Local(), round_).batch_size for round_ in (1, 2, 3)] == [10, 15, 22]
    assert type(given.local_of(Local(), 1).batch_size) is int


def test_an_array_task_gets_the_plain_values_of_the_round():
    given = Given.read({"C": {"kind": "linear", "start": 4, "end": 0, "rounds": 4}, "solver": "saga"})
    assert given.overrides(3) == {"C": 2.0, "solver": "saga"}
    with pytest.raises(OverridesRefused, match=r"there is no number to start from: set local.C, or start"):
        Given.read({"C": {"kind": "linear", "rounds": 4}}).overrides(1)


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ({"lr": {"kind": "linear", "end": -1.0, "rounds": 4}}, "schedule.local.lr: must be positive and finite, got "),
        (
            {"lr": {"kind": "exponential", "factor": 1e-30}},
            "schedule.local.lr: must be positive and finite, got 0.0 in round 100",
        ),
        ({"epochs": {"kind": "list", "values": [1, "a"]}}, "schedule.local.epochs: expected int, got 'a' in round 2"),
        ({"keep": {"kind": "list", "values": ["head.*"]}}, "schedule.local.keep: is the same in all rounds"),
        ({"rate": {"kind": "list", "values": [1]}}, "schedule.local.rate: unknown key (known: epochs, batch_size"),
        ({"lr": 0.0}, "local.lr: must be positive and finite, got 0.0"),
    ],
)
def test_a_value_that_does_not_fit_in_some_round_is_refused_before_the_first(table, fault):
    with pytest.raises(OverridesRefused) as refused:
        Given.read(table).check(Local(), rounds=100)
    assert refused.value.faults[0].startswith(fault)


def test_values_have_the_declared_names_and_types():
    declared = {"rate": 0.5, "column": "age", "depth": 3, "is_new": False, "limit": None}
    given = {"rate": 1, "depth": "4", "is_new": "true", "limit": 7}
    changed = with_values(declared, given, where="task", declared_by="Task(options=...)")
    assert changed == {"rate": 1.0, "column": "age", "depth": 4, "is_new": True, "limit": 7}
    assert type(changed["rate"]) is float
    with pytest.raises(OverridesRefused) as refused:
        with_values(declared, {"colum": "x", "depth": 1.5, "is_new": 1}, where="task", declared_by="Task(options=...)")
    assert refused.value.faults == (
        "task.colum: unknown key, got 'x' (known, from Task(options=...): rate, column, depth, is_new, limit)",
        "task.depth: expected int, got 1.5",
        "task.is_new: expected bool, got 1",
    )


def test_a_setting_with_a_schedule_is_refused_by_its_schedules_name_and_each_setting_once():
    given = Given.read(
        {
            "lr": {"kind": "list", "values": [0.1, "x", -0.2]},
            "epochs": {"kind": "list", "values": [1, 1, 0]},
        }
    )
    with pytest.raises(OverridesRefused) as refused:
        given.check(Local(), rounds=3)
    assert refused.value.faults == (
        "schedule.local.lr: expected float, got 'x' in round 2",
        "schedule.local.epochs: must be at least 1, got 0 in round 3",
    )


@pytest.mark.parametrize("is_torch", [True, False])
def test_values_of_the_run_and_of_the_sites_are_refused_together(is_torch):
    declared = {"options": {"l2": 0.0}, "settings": {"file": ""}, "sites": ("a", "b")}
    task = Task(model=print, data=print, loss=print, **declared) if is_torch else SimpleNamespace(**declared)
    with pytest.raises(OverridesRefused) as refused:
        tuned(task, {"l2": "x"}, {"a": {"file": 3}, "q": {"file": "y"}})
    assert refused.value.faults == (
        "task.l2: expected float, got 'x'",
        "sites.a.file: expected str, got 3",
        "sites.q: no site of the task (its sites: a, b)",
    )


def test_an_array_task_has_the_settings_of_its_sites_at_each_of_them_and_the_runs_options():
    """A worker takes the run's values over those of the simulated sites, which it must keep."""
    seen = {}

    def train(parameters, instructions):
        seen[instructions.site] = (instructions.context.settings["file"], instructions.context.options["l2"])
        return Trained({"w": np.zeros(1, np.float32)}, 1)

    task = SimpleNamespace(
        initial=lambda seed: {"w": np.zeros(1, np.float32)},
        train=train,
        sites=("a", "b"),
        options={"l2": 0.0},
        settings={"file": ""},
        site_settings={"b": {"file": "own.csv"}},
    )
    given = tuned(tuned(task, {}, {"a": {"file": "a.csv"}}), {"l2": 0.5})
    for site in task.sites:
        bench = ArrayBench(given, {"site": site, "local": {"task.l2": 0.25}})
        bench.train(Received(bench.initial(0)), {"seed": 0, "local": {"task.l2": 0.125}}, Deadline.never())
    assert seen == {"a": ("a.csv", 0.125), "b": ("own.csv", 0.125)}


def test_a_whole_number_that_no_float_holds_is_no_float():
    with pytest.raises(OverridesRefused, match=r"task.l2: expected float, got 1000"):
        with_values({"l2": 0.0}, {"l2": 10**400}, where="task", declared_by="options")
    with pytest.raises(ValueError, match=r"local.lr: expected float, got 1000"):
        Local(lr=10**400)
