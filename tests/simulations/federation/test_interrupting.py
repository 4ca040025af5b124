"""Simulated runs that end before their time: by a kill, by Ctrl-C at an awkward moment, with updates that wait."""

import numpy as np
import pytest

from atoll.aggregation.layout import Tensor
from atoll.cli.files import load_user_task
from atoll.server.codec import StoreCorrupted
from atoll.simulations.federation import keeping, models
from atoll.simulations.federation.keeping import Keeper
from atoll.simulations.federation.run import opened
from atoll.simulations.federation.updates import Updates
from tests.simulations.federation.simulating import lines, settings, simulate, without_real_time

SLOW = ("devices.examples_per_s={low=1,high=30}", "round.deadline=600.0", "rounds=9")
LATE = ("round.cohort_size=2", "round.over_selection=2.0", "round.late=next_round", "round.max_staleness=3", *SLOW)
BUFFERED = ("round.mode=fedbuff", "round.buffer_size=2", "round.concurrency=3", *SLOW)
ASYNCHRONOUS = ("round.mode=fedasync", "round.concurrency=3", *SLOW)
PAUSE, ASKING = "pause=5.0", "evaluation.clients_every=1"
TOPK = ("aggregation.codec=topk", "aggregation.topk_fraction=0.25")


class Killed(BaseException):
    """The process ends where it is."""


def begun(folder, overrides, on_round):
    """A run until `on_round` ends it, or what it does to the federation."""
    file = settings(*overrides)
    with opened(file, load_user_task(file.task), folder, on_round=lambda line: None, is_fresh=False) as federation:
        federation._on_round = lambda line: on_round(federation, line["round"])
        return federation.run()


def interrupted(folder, overrides, after):
    return begun(folder, overrides, lambda federation, number: federation.interrupt() if number == after else None)


@pytest.mark.parametrize("optimizer", ["fedavg", "fedadam"])
def test_what_a_killed_run_goes_on_with_is_no_garbage(tmp_path, monkeypatch, optimizer):
    def kill(_, number):
        if number == 11:
            raise Killed

    overrides = ("round.cohort_size=4", "rounds=14", f"optimizer.name={optimizer}", "round.max_staleness=0")
    whole, told = simulate(tmp_path / "whole", *overrides)
    monkeypatch.setattr(models, "GARBAGE_EVERY_S", 0.0)
    monkeypatch.setattr(keeping, "SHARE", 1e-12)  # saved after the first round, and not again
    with pytest.raises(Killed):
        begun(tmp_path / "parts", overrides, kill)
    assert Keeper(tmp_path / "parts", lambda: 0.0).load().ledger.version == 1
    result, found = simulate(tmp_path / "parts", *overrides)
    assert result["model_digest"] == whole["model_digest"]
    assert without_real_time(found) == without_real_time(told)


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
def test_updates_that_are_accepted_between_two_rounds_are_there_after_an_interruption(tmp_path, overrides):
    num_waiting = 0
    for after in range(1, 9):
        folder = tmp_path / str(after)
        assert interrupted(folder, overrides, after)["rounds"] == after
        waiting = {str(update.digest) for update in Keeper(folder, lambda: 0.0).load().updates}
        num_waiting += len(waiting)
        assert waiting <= {path.name for path in (folder / "updates").iterdir()}
        result, told = simulate(folder, *overrides)
        assert (result["state"], result["version"]) == ("finished", 9)
        assert [line["round"] for line in told] == list(range(1, 10))
        assert all(line["train"] is not None for line in told)
    assert num_waiting


def test_an_update_that_is_gone_is_told(tmp_path):
    overrides = (*BUFFERED, PAUSE)
    after = 0
    while not (found := list((tmp_path / str(after) / "updates").glob("*"))):
        after += 1
        interrupted(tmp_path / str(after), overrides, after)
    found[0].write_bytes(b"short")
    with pytest.raises(StoreCorrupted, match=f"{found[0].name}: the update that the run goes on with has 5 bytes, not"):
        simulate(tmp_path / str(after), *overrides)
    found[0].unlink()
    with pytest.raises(StoreCorrupted, match="the update that the run goes on with is gone"):
        simulate(tmp_path / str(after), *overrides)


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
    saved = Keeper(folder, lambda: 0.0).load().ledger
    assert (saved.next_round, saved.version, saved.model_digest) == (4, 3, result["model_digest"])
    assert len(lines(folder)) == 3
    assert simulate(folder, *overrides)[0]["model_digest"] == whole["model_digest"]
    assert without_real_time(lines(folder)) == without_real_time(told)


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
