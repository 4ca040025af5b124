"""Simulated runs that end early: by a kill, by Ctrl-C at an awkward moment, with updates that wait for a fold."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import TensorDataset

from atoll.ground.file_digest import read_sums
from atoll.operations.load import load_user_task
from atoll.protocol.settings import ConfigError
from atoll.server.errors import StoreCorrupted
from atoll.simulations.federation import models, report, snapshots
from atoll.simulations.federation.report import RunFolder
from atoll.simulations.federation.run import opened
from atoll.simulations.federation.seal import unseal
from atoll.simulations.federation.snapshots import SnapshotFile
from atoll.simulations.federation.updates import Updates
from atoll.tensors.layout import Tensor
from tests.simulations.federation.simulating import TASK, lines, settings, simulate, without_real_time

SLOW = ("devices.examples_per_s={low=1,high=30}", "round.deadline=600.0", "rounds=9")
LATE = ("round.cohort_size=2", "round.over_selection=2.0", "round.late=next_round", "round.max_staleness=3", *SLOW)
BUFFERED = ("round.mode=fedbuff", "round.buffer_size=2", "round.concurrency=3", *SLOW)
ASYNCHRONOUS = ("round.mode=fedasync", "round.concurrency=3", *SLOW)
PAUSE, ASKING = "pause=5.0", "evaluation.clients_every=1"
TOPK = ("aggregation.codec=topk", "aggregation.topk_fraction=0.25")


class Killed(BaseException):
    """The abrupt end of the process."""


def begun(folder, overrides, on_round):
    """Run until `on_round` raises, or interrupts the federation."""
    file = settings(*overrides)
    with opened(file, load_user_task(file.task), folder, on_round=lambda line: None, is_fresh=False) as federation:
        federation._on_round = lambda line: on_round(federation, line["round"])
        return federation.run()


def interrupted(folder, overrides, after):
    return begun(folder, overrides, lambda federation, number: federation.interrupt() if number == after else None)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["fedavg", "fedadam"])
def test_what_a_killed_run_goes_on_with_is_no_garbage(tmp_path, monkeypatch, optimizer):
    def kill(_, number):
        if number == 11:
            raise Killed

    overrides = ("round.cohort_size=4", "rounds=14", f"optimizer.name={optimizer}", "round.max_staleness=0")
    whole, told = simulate(tmp_path / "whole", *overrides)
    monkeypatch.setattr(models, "GARBAGE_EVERY_S", 0.0)
    monkeypatch.setattr(snapshots, "SHARE", 1e-12)  # saved after the first round, and not again
    with pytest.raises(Killed):
        begun(tmp_path / "parts", overrides, kill)
    assert SnapshotFile(tmp_path / "parts", lambda: 0.0).load().ledger.version == 1
    result, found = simulate(tmp_path / "parts", *overrides)
    assert result["model_digest"] == whole["model_digest"]
    assert without_real_time(found) == without_real_time(told)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (*LATE, PAUSE),
        (*LATE, PAUSE, *TOPK),
        (*LATE, ASKING),
        (*BUFFERED, PAUSE),
        (*BUFFERED, ASKING),
        (*ASYNCHRONOUS, PAUSE),
        (*ASYNCHRONOUS, ASKING),
    ],
    ids=["late", "late-topk", "late-asking", "fedbuff", "fedbuff-asking", "fedasync", "fedasync-asking"],
)
def test_updates_accepted_between_two_rounds_survive_an_interruption(tmp_path, overrides):
    num_waiting = 0
    for after in (3, 5, 8):
        folder = tmp_path / str(after)
        assert interrupted(folder, overrides, after)["rounds"] == after
        waiting = {str(update.digest) for update in SnapshotFile(folder, lambda: 0.0).load().updates}
        num_waiting += len(waiting)
        assert waiting <= {path.name for path in (folder / "updates").iterdir()}
        result, told = simulate(folder, *overrides)
        assert (result["state"], result["version"]) == ("finished", 9)
        assert [line["round"] for line in told] == list(range(1, 10))
        assert all(line["train"] is not None for line in told)
    assert num_waiting


def test_an_interruption_while_a_version_is_measured_keeps_its_round(tmp_path):
    overrides = ("round.cohort_size=4", "rounds=5", "evaluation.server_every=1")
    whole, told = simulate(tmp_path / "whole", *overrides)
    file, folder = settings(*overrides), tmp_path / "parts"
    with opened(file, load_user_task(file.task), folder, on_round=lambda line: None, is_fresh=True) as federation:
        measure = federation.evaluations.of_server

        def interrupting(version):
            if version.version == 3:
                federation.interrupt()
            return measure(version)

        federation.evaluations.of_server = interrupting
        result = federation.run()
    assert (result["rounds"], result["version"]) == (3, 3)
    saved = SnapshotFile(folder, lambda: 0.0).load().ledger
    assert (saved.next_round, saved.version, saved.model_digest) == (4, 3, result["model_digest"])
    assert len(lines(folder)) == 3
    assert simulate(folder, *overrides)[0]["model_digest"] == whole["model_digest"]
    assert without_real_time(lines(folder)) == without_real_time(told)


@pytest.mark.slow
def test_a_pause_in_which_something_happens_is_not_begun_anew(tmp_path):
    trace = tmp_path / "awake.csv"
    trace.write_text("client,from_s,to_s,period_s\na,0,20,30\nb,5,28,30\nc,0,29.9,30\nd,10,29,30\n")
    overrides = (
        *("round.cohort_size=3", "rounds=4", "pause=60.0", "evaluation.server_every=1"),
        *("devices.availability=trace", f"devices.awake_trace={trace}", "coordinator.lease=30.0"),
    )
    whole, told = simulate(tmp_path / "whole", *overrides)
    for after in (1, 2, 3):
        interrupted(tmp_path / str(after), overrides, after)
        result, found = simulate(tmp_path / str(after), *overrides)
        assert result["virtual_s"] == whole["virtual_s"]
        assert without_real_time(found) == without_real_time(told)


def killed(folder, overrides, after):
    """Run until the process is killed after the line of a round, before the round is saved."""

    def kill(_, number):
        if number == after:
            raise Killed

    with pytest.raises(Killed):
        begun(folder, overrides, kill)


@pytest.mark.parametrize("overrides", [ASYNCHRONOUS, BUFFERED], ids=["fedasync", "fedbuff"])
def test_versions_beyond_the_saved_state_are_forgotten(tmp_path, monkeypatch, overrides):
    monkeypatch.setattr(snapshots, "SHARE", 1e-12)  # saved after the first round, and not again
    killed(tmp_path, overrides, 7)
    stale = models.RunStore(tmp_path / "models", is_durable=False).versions()
    file = settings(*overrides)
    with opened(file, load_user_task(file.task), tmp_path, on_round=lambda line: None, is_fresh=False) as federation:
        assert stale[-1] > federation.machine.ledger.version == 1
        assert federation.versions.store.versions() == [0, 1]
        assert federation.run()["version"] == 9


def test_what_a_run_without_a_saved_state_has_left_belongs_to_no_other(tmp_path):
    whole, _ = simulate(tmp_path / "whole", "seed=2", "rounds=2", "population.kind=iid", "population.clients=4")
    file = settings("seed=1", "rounds=2", "population.kind=iid", "population.clients=5")
    with opened(file, load_user_task(file.task), tmp_path / "parts", on_round=print, is_fresh=True):
        pass  # killed before its first round was saved
    result, _ = simulate(tmp_path / "parts", "seed=2", "rounds=2", "population.kind=iid", "population.clients=4")
    assert result["model_digest"] == whole["model_digest"]
    populations = [(tmp_path / part / "population.json").read_text() for part in ("whole", "parts")]
    assert populations[0] == populations[1]


@pytest.mark.slow
def test_a_run_that_is_killed_again_before_it_saves_finds_the_versions_of_its_state(tmp_path):
    overrides = ("round.mode=fedbuff", "round.buffer_size=1", "round.concurrency=4", "round.max_staleness=5")
    overrides += ("devices.examples_per_s={low=1,high=60}", "rounds=40")
    for after in (15, 19, 23):
        folder = tmp_path / str(after)
        interrupted(folder, overrides, after)
        killed(folder, overrides, after + 1)
        assert simulate(folder, *overrides)[0]["state"] == "finished"


def test_who_is_away_when_a_run_goes_on_has_a_lease_and_no_more(tmp_path):
    trace = tmp_path / "awake.csv"
    always = "0,999999,1000000"
    trace.write_text(f"client,from_s,to_s,period_s\na,0,5,1000000\nb,0,5,1000000\nc,{always}\nd,{always}\n")
    overrides = ("round.mode=fedasync", "round.concurrency=4", "round.deadline=100000.0", "rounds=20")
    overrides += ("devices.availability=trace", f"devices.awake_trace={trace}", "coordinator.lease=30.0")
    overrides += ("devices.examples_per_s=0.5",)
    interrupted(tmp_path, overrides, 1)
    assert {"a", "b"} <= SnapshotFile(tmp_path, lambda: 0.0).load().ledger.training.keys()
    training = []
    begun(tmp_path, overrides, lambda federation, _: training.append(set(federation.machine.ledger.training)))
    assert {"a", "b"} <= training[0]
    assert not {"a", "b"} & training[-2]


def test_a_signal_while_a_round_is_not_saved_waits_for_one_that_is(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "SHARE", 1e-12)
    file = settings("rounds=9")
    with opened(file, load_user_task(file.task), tmp_path, on_round=lambda line: None, is_fresh=True) as federation:
        save_if_due = federation._snapshot_file.save_if_due

        def with_signal(snapshot, *, always):
            if federation.machine.ledger.next_round == 5:
                federation.interrupt()
            return save_if_due(snapshot, always=always)

        federation._snapshot_file.save_if_due = with_signal
        result = federation.run()
    saved = SnapshotFile(tmp_path, lambda: 0.0).load().ledger
    assert (saved.version, saved.model_digest) == (result["version"], result["model_digest"])
    assert result["rounds"] == 5


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :]


def damages(data):
    """Return the content of a file with a flipped byte, and cut."""
    return flipped(data, len(data) // 2), data[: len(data) // 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        (("optimizer.name=fedadam", *TOPK, "rounds=5"), {"models", "clients"}),
        ((*BUFFERED, PAUSE), {"models", "updates"}),
    ],
    ids=["slots and residuals", "updates"],
)
def test_no_damage_of_any_file_changes_a_number_of_a_resumed_run(tmp_path, overrides, kinds):
    """A file that is damaged is named before anything is trained, or the run does not need it."""
    whole, told = simulate(tmp_path / "whole", *overrides)
    kept, told_of = tmp_path / "kept", []
    interrupted(kept, overrides, 4)
    names = {str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file() and path.stat().st_size}
    assert kinds <= {name.partition("/")[0] for name in names}
    for name in sorted(names - {"lock"}):
        for content in damages((kept / name).read_bytes()):
            shutil.rmtree(folder := tmp_path / "damaged", ignore_errors=True)
            shutil.copytree(kept, folder)
            (folder / name).write_bytes(content)
            try:
                result, lines_now = simulate(folder, *overrides)
            except (StoreCorrupted, ConfigError) as error:
                told_of.append((Path(name).name, str(error)))
                continue
            assert name not in sealed_names(kept), f"{name} was used"
            assert without_real_time(lines_now) == without_real_time(told)
            assert result["model_digest"] == whole["model_digest"]
    assert [error for name, error in told_of if name not in error] == []
    assert len(told_of) >= 2 * len(sealed_names(kept))


def sealed_names(folder):
    return {*SnapshotFile(folder, lambda: 0.0).load().files, *read_sums(folder), "state.json"}


def test_the_bytes_of_a_state_are_covered_by_its_digest(tmp_path):
    interrupted(tmp_path, ("rounds=5",), 2)
    path, state = tmp_path / "state.json", SnapshotFile(tmp_path, lambda: 0.0)
    before, data = state.load(), path.read_bytes()
    refused = 0
    for place in range(0, len(data), 37):
        path.write_bytes(flipped(data, place))
        try:
            assert state.load() == before  # a space that is another one
        except StoreCorrupted:
            refused += 1
    assert refused > 0.9 * len(data) / 37
    for tenth in range(10):
        path.write_bytes(data[: len(data) * tenth // 10])
        with pytest.raises(StoreCorrupted, match=r"state\.json: not the state of a simulated run"):
            state.load()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows[:-1], r"has trained on \d+ rows of 4 clients, and the task has \d+ rows of 4 clients now"),
        (lambda rows: rows.flip(0), "has trained on rows of client"),
    ],
    ids=["fewer", "moved"],
)
@pytest.mark.parametrize("rounds", [3, 5], ids=["finished", "interrupted"])
def test_a_run_does_not_go_on_with_other_data(tmp_path, change, told, rounds):
    interrupted(tmp_path, (f"rounds={rounds}",), 3)
    file = settings("rounds=5")
    task = load_user_task(file.task)

    def data(site, split):
        found = task.data(site, split)
        return TensorDataset(*map(change, found.tensors)) if split == "train" else found

    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=f"{told}.*give the task that data again, or choose another --out"):
        with opened(file, replace(task, data=data), tmp_path, on_round=print, is_fresh=False):
            pass
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert simulate(tmp_path, "rounds=5")[0]["state"] == "finished"


def test_another_model_and_missing_settings_are_the_operator_s_mistakes(tmp_path):
    interrupted(tmp_path, ("rounds=5",), 3)
    text = Path(TASK.removesuffix(":task")).read_text()
    other = tmp_path / "line_task.py"
    other.write_text(text.replace("Linear(8, 2)", "Linear(8, 3)"))
    file = settings("rounds=5")
    with pytest.raises(ConfigError, match="the task's model differs from the run's"):
        with opened(file, load_user_task(f"{other}:task"), tmp_path, on_round=print, is_fresh=False):
            pass
    unseal(tmp_path)
    (tmp_path / "run.toml").unlink()
    with pytest.raises(ConfigError, match=r"run\.toml: is damaged"):
        simulate(tmp_path, "rounds=5")


def test_the_lines_of_a_run_are_whole_whenever_a_process_ends(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    for number in (1, 2, 3):
        folder.add({"round": number})
    folder.close()
    before = (tmp_path / "rounds.jsonl").read_bytes()

    def die(*_, **__):
        raise Killed

    monkeypatch.setattr(report, "write_atomically", die)
    RunFolder(tmp_path, 3).close()  # nothing is to be dropped, so nothing is written
    with pytest.raises(Killed):
        RunFolder(tmp_path, 2)
    assert (tmp_path / "rounds.jsonl").read_bytes() == before


def test_a_forged_update_is_never_written_over_the_one_that_a_state_names(tmp_path, monkeypatch):
    from atoll.simulations.federation import updates as module

    monkeypatch.setattr(module, "IN_MEMORY_MAX", 0)
    held, digest = Updates(tmp_path, None), "0" * 64
    honest = {t.name: np.ones(t.shape, np.float32) for t in LAYOUT}
    held.add(digest, honest, {})
    kept = held.write([digest])
    held.replace(digest, {name: -array for name, array in honest.items()})
    assert held.arrays(digest)["0.bias"].tolist() == [-1, -1]
    assert Updates(tmp_path, None, kept).arrays(digest)["0.bias"].tolist() == [1, 1]


LAYOUT = (Tensor("0.bias", "F32", (2,)), Tensor("0.weight", "F32", (2, 3)))


@pytest.mark.parametrize("layout", [LAYOUT, None], ids=["rows", "files"])
@pytest.mark.parametrize("memory", [1 << 30, 0], ids=["memory", "disk"])
def test_updates_come_back_as_they_were(tmp_path, monkeypatch, layout, memory):
    from atoll.simulations.federation import updates as module

    monkeypatch.setattr(module, "IN_MEMORY_MAX", memory)
    rng = np.random.default_rng(0)
    made = {
        f"{number:064d}": {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in LAYOUT}
        for number in range(4)
    }
    held = Updates(tmp_path, layout)
    for number, (digest, arrays) in enumerate(made.items()):
        held.add(digest, arrays, {"normalizer": 1.5 + number, "effective_steps": 3.0})
    kept = held.write(list(made)[:2])
    held.keep_only([])  # a round has used them; the process is killed before this is written down
    again = Updates(tmp_path, layout, kept)
    for digest in list(made)[:2]:
        for name, array in again.arrays(digest).items():
            assert array.tobytes() == made[digest][name].tobytes()
        steps = again.rows([digest])[0].steps if layout else again.metas([digest])[digest].steps
        assert steps == (1.5 + list(made).index(digest), 3.0)
    for _ in range(2):
        again.keep_only([])
        again.write([])
    assert not list(tmp_path.iterdir())
