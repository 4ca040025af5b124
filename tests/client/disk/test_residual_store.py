"""The store of residuals: current once their update is accepted, also when the agent is killed in between."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from atoll.client.disk import residual_store
from atoll.client.disk.named_digest import StateDamaged
from atoll.client.disk.residual_store import Owner, ResidualStore
from atoll.protocol.vocabulary import Digest, RunId
from atoll.tensors.safetensors_file import read, write
from atoll.tensors.updates.encoded_writer import REPLACES

OWNER = Owner("residual", RunId("run-1"), "tiny:task")
OTHERS = (
    Owner("residual", RunId("run-2"), "tiny:task"),
    Owner("residual", RunId("run-1"), "other:task"),
    Owner("control", RunId("run-1"), "tiny:task"),
)


def digest(number):
    return Digest(f"{number:064x}")


def made(path: Path, value: float, replaces=()):
    note = {REPLACES: json.dumps([replaced.name for replaced in replaces])}
    write(path, {"w": np.array([value], np.float32)}, metadata=note)
    return path


def stage(it, tmp_path, number, *, owner=OWNER, value=None):
    """Make a residual from the current ones and stage it, like an agent's training."""
    value = number if value is None else value
    it.stage(owner, digest(number), made(tmp_path / "made", value, it.current(owner)))


def values(it, owner=OWNER):
    return [read(path)["w"].item() for path in it.current(owner)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


def damaged(data):
    """Yield a content with each of its bits flipped in turn at one place of each byte, and cut at ten places."""
    for place in range(len(data)):
        yield data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :]
    yield from (data[: len(data) * tenth // 10] for tenth in range(10))


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_damaged_residual_is_named_and_counts_in_no_update(tmp_path, folder, is_answered):
    """Also one whose update has no answer: it says which residuals are in it."""
    it = ResidualStore(folder)
    stage(it, tmp_path, 1)
    it.settle(digest(1), accepted=True)
    if not is_answered:
        stage(it, tmp_path, 2)
    path = next(folder.glob("*.safetensors" if is_answered else "*.staged"))
    whole = path.read_bytes()
    for content in damaged(whole):
        path.write_bytes(content)
        with pytest.raises(StateDamaged, match=f"{path.name} is damaged"):
            it.current(OWNER)
    path.write_bytes(whole)
    assert values(it) == ([1.0] if is_answered else [])


def test_files_of_an_earlier_program_stay_current(tmp_path, folder):
    made(folder / f"{OWNER.stem}.{digest(1)}.safetensors", 1.0)
    it = ResidualStore(folder)
    assert values(it) == [1.0]
    replaced = folder / f"{OWNER.stem}.{digest(1)}.safetensors"
    it.stage(OWNER, digest(2), made(tmp_path / "made", 2.0, [replaced]))
    assert values(it) == []
    it.settle(digest(2), accepted=True)
    assert values(ResidualStore(folder)) == [2.0]


def test_staged_is_current_when_its_update_is_accepted(tmp_path, folder):
    it = ResidualStore(folder)
    stage(it, tmp_path, 1)
    assert values(it) == []
    it.settle(digest(1), accepted=True)
    assert values(it) == [1.0]
    it.settle(digest(1), accepted=True)  # the same answer again
    assert values(it) == [1.0]


def test_of_a_refused_update_nothing_is_kept_and_the_old_stays(tmp_path, folder):
    it = ResidualStore(folder)
    stage(it, tmp_path, 1)
    it.settle(digest(1), accepted=True)
    stage(it, tmp_path, 2)
    assert values(it) == [], "what an open update was made from belongs to it"
    it.settle(digest(2), accepted=False)
    assert values(it) == [1.0]
    it.settle(digest(2), accepted=True)  # it was refused: a later word changes nothing
    assert values(it) == [1.0]
    assert len(list(folder.iterdir())) == 1


def test_two_updates_that_are_open_at_once_share_nothing(tmp_path, folder):
    it = ResidualStore(folder)
    stage(it, tmp_path, 1)
    it.settle(digest(1), accepted=True)
    stage(it, tmp_path, 2)
    stage(it, tmp_path, 3)  # made from nothing: 1 belongs to 2
    it.settle(digest(3), accepted=True)
    assert values(it) == [3.0]
    it.settle(digest(2), accepted=True)
    assert values(it) == [2.0, 3.0]
    stage(it, tmp_path, 4)
    it.settle(digest(4), accepted=True)
    assert values(it) == [4.0]


@pytest.mark.parametrize("other", OTHERS, ids=lambda owner: f"{owner.name} {owner.run_id} {owner.task}")
def test_runs_tasks_and_kinds_are_apart(tmp_path, folder, other):
    it = ResidualStore(folder)
    stage(it, tmp_path, 1)
    stage(it, tmp_path, 1, owner=other, value=7)
    it.settle(digest(1), accepted=True)
    assert (values(it), values(it, other)) == ([1.0], [7.0])
    it.forget(OWNER.run_id)
    assert values(it) == []
    assert values(it, other) == ([7.0] if other.run_id != OWNER.run_id else [])


def test_what_was_staged_for_no_update_of_the_spool_is_gone_after_a_restart(tmp_path, folder):
    it = ResidualStore(folder)
    stage(it, tmp_path, 1)
    it.settle(digest(1), accepted=True)
    stage(it, tmp_path, 2)
    (folder / "junk").write_bytes(b"")
    again = ResidualStore(folder, [digest(2)])
    assert values(again) == []
    assert values(ResidualStore(folder, [])) == [1.0]
    assert len(list(folder.iterdir())) == 1


def test_killed_between_the_rename_and_the_deletion_it_finishes_after_the_restart(tmp_path, folder, monkeypatch):
    it = ResidualStore(folder, [])
    stage(it, tmp_path, 1)
    it.settle(digest(1), accepted=True)
    stage(it, tmp_path, 2)
    monkeypatch.setattr(ResidualStore, "_drop_replaced", lambda self, current: None)
    it.settle(digest(2), accepted=True)
    monkeypatch.undo()
    assert values(it) == [1.0, 2.0]
    again = ResidualStore(folder, [digest(2)])  # the spool still has it
    assert values(again) == [2.0]
    again.settle(digest(2), accepted=True)  # it is sent again, and accepted again
    assert values(again) == [2.0]


def test_old_files_and_names_that_lead_elsewhere(tmp_path, folder):
    it = ResidualStore(folder)
    stage(it, tmp_path, 1)
    it.settle(digest(1), accepted=True)
    victim = made(tmp_path / "victim", 0)
    it.stage(OWNER, digest(2), made(tmp_path / "made", 2, [Path("x")]))
    staged = next(folder.glob(f"*{residual_store.STAGED}"))
    write(staged, {"w": np.zeros(1, np.float32)}, metadata={REPLACES: json.dumps([f"../{victim.name}", staged.name])})
    it.settle(digest(2), accepted=True)
    assert victim.exists()
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    assert values(ResidualStore(folder)) == []
    assert list(folder.iterdir()) == []


def test_task_and_run_lead_out_of_no_folder(tmp_path, folder):
    it, wild = ResidualStore(folder), Owner("residual", RunId("../../x\0*"), "/etc/*?[a]\ud800")
    stage(it, tmp_path, 1, owner=wild)
    it.settle(digest(1), accepted=True)
    assert values(it, wild) == [1.0]
    assert [path.parent for path in it.current(wild)] == [folder]


class Ledger(RuleBasedStateMachine):
    """Updates with sent = made + owed - left: over any answers and restarts no part is lost or counted twice."""

    folder: Path

    def __init__(self):
        super().__init__()
        for path in self.folder.rglob("*.*"):
            path.unlink()
        self.it, self.number = ResidualStore(self.folder / "kept"), 0
        self.open: dict[int, tuple[float, float]] = {}  # number -> (made, sent)
        self.made = self.sent = 0.0

    @rule(value=st.integers(-50, 50), left=st.integers(-50, 50))
    def train(self, value, left):
        self.number += 1
        owed = sum(values(self.it))
        stage(self.it, self.folder, self.number, value=left)
        self.open[self.number] = (value, value + owed - left)

    @rule(data=st.data(), accepted=st.booleans())
    def answer(self, data, accepted):
        if self.open:
            number = data.draw(st.sampled_from(sorted(self.open)))
            made, sent = self.open.pop(number)
            self.it.settle(digest(number), accepted=accepted)
            self.made, self.sent = self.made + made * accepted, self.sent + sent * accepted

    @rule()
    def restart(self):
        self.it = ResidualStore(self.folder / "kept", [digest(number) for number in self.open])

    @invariant()
    def accepted_updates_and_what_is_owed_add_up(self):
        if not self.open:
            assert self.made == self.sent + sum(values(self.it))


@pytest.mark.slow
def test_no_value_is_lost_or_counted_twice_over_any_answers_and_restarts(tmp_path, folder):
    Ledger.folder = tmp_path
    run_state_machine_as_test(Ledger, settings=settings(max_examples=60, stateful_step_count=25, deadline=None))


def test_residuals_on_a_volume_of_its_own_are_staged(tmp_path, other_disk):
    it = ResidualStore(other_disk)
    stage(it, tmp_path, 1)
    it.settle(digest(1), accepted=True)
    assert values(ResidualStore(other_disk)) == [1]
