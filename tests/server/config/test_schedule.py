"""The tables of a run that change its settings over the rounds, and its task's options."""

import json

import pytest

from atoll.protocol.settings import ConfigError, effective, load_text
from atoll.server.config.run import RunConfig
from atoll.server.config.run_changes import changed, changes_of, moved_ends

TASK = 'task = "digits.py:task"\n'


def run(text, *overrides):
    return load_text(RunConfig, text, overrides, name="run.toml")


def faults(text, *overrides):
    with pytest.raises(ConfigError) as refused:
        run(text, *overrides)
    return list(refused.value.faults)


def test_the_table_of_the_task_has_its_reference_and_its_options():
    as_table = run('[task]\nreference = "digits.py:task"\nsmoothing = 0.1\n')
    assert (as_table.task, as_table.options) == ("digits.py:task", {"smoothing": 0.1})
    assert as_table == run(TASK, "task.smoothing=0.1")
    assert as_table == run(effective(as_table))
    assert run(effective(as_table), "task.smoothing=0.2").options == {"smoothing": 0.2}
    assert run("", 'task="digits.py:task"', "task.deep=true").options == {"deep": True}


def test_an_option_is_a_plain_value():
    assert faults(TASK, "task.table={}")[0].startswith("--set: task.table: got {}; allowed: ")
    assert faults(TASK, "task.table={a = [1]}")[0].startswith("--set: task.table.a: got [1]; allowed: ")
    assert faults("[task]\nsmoothing = 0.1\n")[0].startswith("run.toml: task: missing")


def test_the_values_for_the_task_travel_as_one_table():
    config = run(
        TASK,
        "rounds=20",
        "local.lr=0.3",
        "local.epochs=2",
        "task.smoothing=0.1",
        'schedule.local.lr={kind = "cosine", end = 0.01}',
        'schedule.local.momentum={kind = "step", factor = 0.5, every = 3, start = 0.9}',
    )
    assert json.loads(json.dumps(config.given)) == {
        "lr": {"kind": "cosine", "end": 0.01, "rounds": 20, "start": 0.3},
        "epochs": 2,
        "momentum": {"kind": "step", "factor": 0.5, "every": 3, "start": 0.9},
        "task.smoothing": 0.1,
    }


def test_the_server_optimizer_has_its_number_of_the_version():
    config = run(
        TASK,
        "optimizer.name=fedadam",
        'schedule.optimizer.lr={kind = "exponential", factor = 0.5}',
        'schedule.optimizer.beta1={kind = "list", values = [0.0, 0.9]}',
    )
    settings = [config.optimizer_at(version) for version in (1, 2, 3)]
    assert [each.lr for each in settings] == [0.1, 0.05, 0.025]  # FedAdam's own rate, halved
    assert [each.beta1 for each in settings] == [0.0, 0.9, 0.9]
    assert run(TASK).optimizer_at(7) == run(TASK).optimizer


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ('schedule.optimizer.beta1={kind = "cosine"}', "schedule: optimizer.beta1: no setting of fedavg (known: lr)"),
        ('schedule.optimizer.name={kind = "list", values = ["x"]}', "schedule: optimizer.name: no setting of fedavg"),
        (
            'schedule.optimizer.lr={kind = "linear", end = -1.0}',
            "schedule: optimizer.lr: -0.8 in round 10 is not allowed",
        ),
        ('schedule.local.lr={kind = "step", factor = 2.0}', "schedule: local.lr: every: step needs it"),
        ('schedule.local.lr={kind = "list", values = []}', "schedule: local.lr: values: must have at least one"),
    ],
)
def test_what_cannot_be_in_some_round_is_refused(override, fault):
    found = faults(TASK, override)
    assert any(fault in line for line in found), found


def test_two_starts_of_one_setting_are_refused():
    one = 'schedule.local.lr={kind = "cosine", start = 0.2}'
    assert faults(TASK, "local.lr=0.1", one) == [
        "run.toml: schedule: local.lr: has start, and local.lr is set too: leave one out"
    ]
    mode = ("round.mode=fedasync", "round.concurrency=2", 'schedule.optimizer.lr={kind = "cosine"}')
    assert any("mode fedasync has only its alpha" in line for line in faults(TASK, *mode))


def test_a_resumed_run_may_change_them_and_the_record_names_them_as_they_are_set():
    before = run(TASK, "rounds=5", "task.smoothing=0.1")
    after = changed(before, ["rounds=9", "task.smoothing=0.2", 'schedule.local.lr={kind = "cosine"}'], version=3)
    found = changes_of(before, after)
    assert found["task.smoothing"] == (0.1, 0.2)
    assert found["rounds"] == (5, 9)
    assert found["schedule.local.lr"][0] is None
    assert found["schedule.local.lr"][1]["kind"] == "cosine"


@pytest.mark.parametrize(
    ("schedule", "version", "is_told"),
    [
        ('local.lr={kind = "cosine"}', 3, True),
        ('optimizer.lr={kind = "linear", end = 0.5}', 3, True),
        ('local.lr={kind = "cosine", warmup = 2}', 3, False),  # round 3 has the start, whatever follows
        ('local.lr={kind = "cosine"}', 1, False),
        ('local.lr={kind = "linear", rounds = 7}', 3, False),
        ('local.lr={kind = "exponential", factor = 0.5}', 3, False),
    ],
)
def test_another_number_of_rounds_is_told_where_it_moves_the_end_of_a_schedule(schedule, version, is_told):
    before = run(TASK, "rounds=5", f"schedule.{schedule}")
    told = [*moved_ends(before, changed(before, ["rounds=9"], version=version), version=version)]
    key = schedule.partition("=")[0]
    assert len(told) == is_told
    assert all(f"schedule.{key} ends in round 9 now and did so in round 5" in line for line in told)
    kept = changed(before, ["rounds=9", f"schedule.{key}.rounds=5"], version=version) if is_told else before
    assert not [*moved_ends(before, kept, version=version)]


def test_a_value_of_a_task_beyond_64_bits_or_not_finite_is_a_fault_under_the_name_that_a_person_writes():
    of_list = f"schedule.local.lr.values=[{'9' * 400}]"
    overrides = [f"task.scale={'9' * 400}", "task.other=nan", of_list, "local.n=1e999"]
    told = faults('task = "a.py:task"\nschedule.local.lr.kind = "list"', *overrides)
    found = {fault.removeprefix("--set: ").partition(":")[0]: fault for fault in told}
    assert set(found) == {"task.scale", "task.other", "schedule.local.lr.values", "local.n"}
    assert "beyond 64 bits cannot be sent" in found["task.scale"]
    assert found["task.other"].endswith("got nan; allowed: true | false | integer | number | string, finite")


def test_a_text_is_no_start_of_a_schedule():
    told = faults(TASK, "local.lr=quick", 'schedule.local.lr={kind="linear"}')
    assert told == ["run.toml: local.lr: must be a number where its schedule starts from it, got 'quick'"]
