"""The digest of what does not travel among a run's settings: found with version 0, or wanted from the beginning."""

import pytest

from atoll.protocol.settings import ConfigError
from atoll.server.config.run import RunConfig
from atoll.server.config.run_changes import are_equal, changed, with_frozen

ONE, OTHER = "a1" * 32, "b2" * 32


def test_a_run_has_the_digest_of_its_task_and_travels_with_it() -> None:
    run = with_frozen(RunConfig(task="task.py:task"), ONE)
    assert run.given["model.frozen"] == ONE
    assert "model.frozen" not in with_frozen(RunConfig(task="task.py:task"), "").given


def test_another_digest_than_the_wanted_one_is_refused_with_both() -> None:
    wanted = RunConfig(task="task.py:task", model={"frozen": ONE})  # type: ignore[arg-type]
    assert with_frozen(wanted, ONE) == wanted
    with pytest.raises(ConfigError, match=f"model.frozen: got {ONE}, and the task's digest is {OTHER}"):
        with_frozen(wanted, OTHER)
    with pytest.raises(ConfigError, match=r"no tensor stays at the sites \(Task\(travels"):
        with_frozen(wanted, "")
    with pytest.raises(ValueError, match="frozen"):
        RunConfig(task="task.py:task", model={"frozen": "abc"})  # type: ignore[arg-type]


def test_the_same_file_is_the_same_run_and_a_resume_keeps_the_digest() -> None:
    file = RunConfig(task="task.py:task")
    run = with_frozen(file, ONE)
    assert are_equal(run, file)
    assert not are_equal(run, RunConfig(task="task.py:task", model={"frozen": OTHER}))  # type: ignore[arg-type]
    assert changed(run, ["rounds=20"], version=3).model.frozen == ONE
    with pytest.raises(ConfigError, match=r"model\.frozen: fixed for the life of a run"):
        changed(run, [f"model.frozen={OTHER}"], version=3)
