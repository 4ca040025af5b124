"""The versions of a simulated run that become files, and the times at which they do."""

import json

import pytest
from safetensors.torch import load_file

from atoll.operations.load import load_user_task
from atoll.protocol.vocabulary import Version
from atoll.simulations.federation import snapshots
from atoll.simulations.federation.run import opened
from tests.simulations.federation import line_task as lines_task
from tests.simulations.federation.simulating import lines, settings, simulate, without_real_time

MANY = ("round.cohort_size=4", "rounds=8")
ADAM = ("optimizer.name=fedadam",)


class Killed(BaseException):
    """The abrupt end of the process."""


def files(folder):
    return {path.name: path.read_bytes() for path in (folder / "models" / "versions").iterdir()}


def versions(folder):
    return sorted(int(name[:6]) for name in files(folder) if name[6:] == ".manifest.json")


@pytest.fixture
def saved_once(monkeypatch):
    """Save the state after the first round, and not again before the end."""
    monkeypatch.setattr(snapshots, "SHARE", 1e-12)


@pytest.mark.usefixtures("saved_once")
def test_a_version_that_is_not_read_is_never_a_file(tmp_path):
    found = []
    simulate(tmp_path, *MANY, on_round=lambda line: found.append(versions(tmp_path)))
    assert found[1:] == [[0, 1]] * 7
    assert versions(tmp_path) == [0, 6, 7, 8]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [(), ADAM])
def test_what_becomes_a_file_at_the_end_is_what_would_have_been_one_at_once(tmp_path, monkeypatch, optimizer):
    for name, share in (("once", 1e-12), ("always", 1e12)):
        monkeypatch.setattr(snapshots, "SHARE", share)
        simulate(tmp_path / name, *MANY, *optimizer)
    once, always = files(tmp_path / "once"), files(tmp_path / "always")
    assert len(once) == (8 if not optimizer else 20)  # version 0 has no slots
    assert once.items() <= always.items()
    newest = load_file(tmp_path / "once" / "models" / "versions" / "000008.safetensors")
    lines_task.model().load_state_dict(newest)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [(), ADAM])
@pytest.mark.usefixtures("saved_once")
def test_a_run_that_was_killed_long_after_it_was_saved_comes_to_the_same_end(tmp_path, optimizer):
    def kill(line):
        if line["round"] == 6:
            raise Killed

    whole, _ = simulate(tmp_path / "whole", *MANY, *optimizer)
    file, folder = settings(*MANY, *optimizer), tmp_path / "parts"
    with (
        pytest.raises(Killed),
        opened(file, load_user_task(file.task), folder, on_round=kill, is_fresh=True) as federation,
    ):
        federation.run()
    assert versions(folder) == [0, 1]
    result, told = simulate(folder, *MANY, *optimizer)
    assert result["model_digest"] == whole["model_digest"]
    assert without_real_time(told) == without_real_time(lines(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("asked_in", ["the log", "a training"])
@pytest.mark.usefixtures("saved_once")
def test_a_run_that_was_interrupted_goes_on_from_the_last_round_that_has_ended(tmp_path, asked_in, monkeypatch):
    whole, _ = simulate(tmp_path / "whole", *MANY)
    file, folder = settings(*MANY), tmp_path / "parts"
    with opened(file, load_user_task(file.task), folder, on_round=lambda line: None, is_fresh=True) as federation:
        if asked_in == "the log":
            federation._on_round = lambda line: federation.interrupt() if line["round"] == 6 else None
        else:
            find = federation.trainings.outcome

            def outcome(training):
                if training.invitation.round_id == 6:
                    federation.interrupt()
                return find(training)

            federation.trainings.outcome = outcome
        interrupted = federation.run()
    assert (interrupted["state"], interrupted["rounds"]) == ("interrupted", 6)
    assert json.loads((folder / "state.json").read_text())["state"]["totals"]["trainings"] == interrupted["trainings"]
    rounds = []
    result, told = simulate(folder, *MANY, on_round=lambda line: rounds.append(line["round"]))
    assert rounds == [7, 8]
    assert result["model_digest"] == whole["model_digest"]
    assert without_real_time(told) == without_real_time(lines(tmp_path / "whole"))


@pytest.mark.usefixtures("saved_once")
def test_a_version_that_a_late_update_may_name_stays_for_longer_than_it_is_in_memory(tmp_path):
    file = settings(*MANY, "round.max_staleness=5")
    found = []
    with opened(file, load_user_task(file.task), tmp_path, on_round=lambda line: None, is_fresh=True) as federation:

        def look(line):
            named = [federation.versions.version(Version(number)) for number in range(max(0, line["round"] - 5), 7)]
            found.append([federation.versions.by_digest(version.digest) == version for version in named])
            for version in named:
                assert federation.versions.arrays(version.digest).keys() == lines_task.model().state_dict().keys()

        federation._on_round = lambda line: look(line) if line["round"] in (6, 7) else None
        federation.run()
    assert found == [[True] * 6, [True] * 5]
    assert versions(tmp_path)[-6:] == [3, 4, 5, 6, 7, 8]
