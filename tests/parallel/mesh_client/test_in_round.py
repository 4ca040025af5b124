"""A training that was killed goes on at its checkpoint with the same bits; one that is told to stop keeps its work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.checkpoint.store import damage
from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.mesh_client.bench import MeshBench
from atoll.parallel.mesh_client.in_round import _copies_are_one, _due
from atoll.parallel.world import read_world
from tests.parallel.forked import run_ranks
from tests.parallel.mesh_client import tasks
from tests.parallel.mesh_client.clients import (
    distance,
    in_one_process,
    killed_on_a_rank,
    on_a_mesh,
    plan_of,
    request_of,
    told_on_a_rank,
    update_in,
    write_version,
)
from tests.parallel.ranks import call_on_ranks

ADAMW = {"optimizer": "adamw", "lr": 0.01, "epochs": 2}


@pytest.mark.real
@pytest.mark.parametrize("options", [{"dp_shard": 2}, pytest.param({"pp": 2, "dp_shard": 2}, marks=pytest.mark.long)])
def test_a_killed_training_goes_on_with_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    """The model has dropout and counts its passes, the optimizer has a state; of 12 steps the first attempt does 7."""
    name = "dropping" if "pp" not in options else "task"
    write_version(tmp_path, name)
    undisturbed = {"checkpoint": str(tmp_path / "undisturbed"), "checkpoint_every": 3}
    expected, update = on_a_mesh(tmp_path, options, name=name, local=ADAMW, **undisturbed)
    interrupted = {"checkpoint": str(tmp_path / "interrupted"), "checkpoint_every": 3}
    request = request_of(tmp_path, "mesh", local=ADAMW, **interrupted)
    num_ranks = 2 if "pp" not in options else 4
    with pytest.raises(RankFailed, match="exit code 9"):
        run_ranks(killed_on_a_rank, num_ranks, name, options, request, 8)
    (folder,) = (tmp_path / "interrupted").iterdir()
    saved = {"step-00000003", "step-00000006"}  # the second save goes on beside the steps 7 and 8
    assert (folder / "latest").read_text() in saved
    answer, found = on_a_mesh(tmp_path, options, name=name, local=ADAMW, **interrupted)
    for tensor, values in update.items():
        np.testing.assert_array_equal(found[tensor], values)
    others = dict.fromkeys(("parts", "evaluation", "mesh"))
    assert answer | others == expected | others
    assert [len(part) for part in answer["parts"]] == [len(part) for part in expected["parts"]]
    (damaged,) = folder.glob("step-00000012")
    file = damaged / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    answer, found = on_a_mesh(tmp_path, options, name=name, local=ADAMW, **interrupted)  # begins anew
    for tensor, values in update.items():
        np.testing.assert_array_equal(found[tensor], values)
    assert answer | others == expected | others
    assert damage(damaged) == []


@pytest.mark.parametrize("examples", [tasks.EXAMPLES, 40])
def test_a_round_begins_anew_where_the_rows_have_changed_since_its_checkpoint(
    examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_version(tmp_path)
    request = request_of(tmp_path, "mesh", local=ADAMW, checkpoint=str(tmp_path / "kept"), checkpoint_every=3)
    with pytest.raises(KeyboardInterrupt):
        counted_here(request, die_at=8)
    monkeypatch.setattr(tasks, "EXAMPLES", examples)
    answer, steps = counted_here(request)
    begins_anew = examples == 40
    assert steps == (answer["steps"] if begins_anew else 6)
    assert (
        "the round starts over, without its checkpoint: it belongs to a training on 44 rows" in caplog.text
    ) == begins_anew
    expected, update = in_one_process(tmp_path, local=ADAMW)
    assert answer["num_examples"] == expected["num_examples"]
    found = update_in(tmp_path / "mesh", answer["parts"])
    for tensor, values in update.items():
        np.testing.assert_array_equal(found[tensor], values)


def counted_here(request: dict[str, Any], die_at: int | None = None) -> tuple[dict[str, Any], int]:
    """Train on a mesh of one rank, this process; return the answer and the steps of this attempt."""
    asked = 0

    def is_told() -> bool:
        nonlocal asked
        asked += 1
        if asked == die_at:
            raise KeyboardInterrupt
        return False

    bench = MeshBench(tasks.task, {"task": "task", "site": "here"}, plan_of({}), read_world())
    return bench.train(request, is_told), asked


@pytest.mark.parametrize(
    ("every", "saves"),
    [
        ({"checkpoint_every": 3}, [3, 6, 9, 10]),
        ({"checkpoint_every_s": 40.0}, [4, 8, 10]),
        ({"checkpoint_every_s": 300.0}, [10]),
        ({}, [10]),
    ],
)
def test_a_save_falls_on_the_step_at_which_the_time_has_passed(every: dict[str, Any], saves: list[int]) -> None:
    """10 steps of 10 s; the end is worth a save after a minute."""
    now = [0.0]
    due = _due(every, 10, Ranks(), lambda: now[0])
    assert _saved(due, now, range(1, 11)) == saves


def test_a_short_round_is_saved_at_its_end_only_with_an_interval_in_steps() -> None:
    now = [0.0]
    assert _saved(_due({"checkpoint_every_s": 300.0}, 5, Ranks(), lambda: now[0]), now, range(1, 6)) == []
    assert _saved(_due({"checkpoint_every": 100}, 5, Ranks(), lambda: now[0]), now, range(1, 6)) == [5]


@pytest.mark.parametrize(
    ("outer", "saves"),
    [
        ("none", [4, 8, 10]),
        ("local_sgd:3", [6, 10]),
        ("diloco:5", [5, 10]),
        ("delayed:0", [4, 8, 10]),
        ("delayed:2", [10]),
    ],
)
def test_a_save_by_time_waits_until_the_copies_are_one_model_anyway(outer: str, saves: list[int]) -> None:
    """Else their synchronizations, and so all numbers, would depend on the clock."""
    now, may_save = [0.0], _copies_are_one(plan_of({"dp_replicate": 2, "outer": outer}))
    due = _due({"checkpoint_every_s": 40.0}, 10, Ranks(), lambda: now[0], may_save)
    assert _saved(due, now, range(1, 11)) == saves


def _saved(due: Callable[[int], bool], now: list[float], steps: range) -> list[int]:
    found = []
    for step in steps:
        now[0] += 10.0
        found += [step] if due(step) else []
    return found


@pytest.mark.real
def test_ranks_with_different_clocks_save_the_same_steps(tmp_path: Path) -> None:
    """Each reading of a rank's clock takes half a second: the first rank to find the time passed decides for all."""
    write_version(tmp_path)
    every = {"checkpoint": str(tmp_path / "kept"), "checkpoint_every_s": 4.0}
    expected, _ = on_a_mesh(tmp_path, {"dp_shard": 2}, **every)
    (folder,) = (tmp_path / "kept").iterdir()
    assert (folder / "latest").read_text() == f"step-{expected['steps']:08d}"


@pytest.mark.real
def test_the_word_of_the_first_rank_ends_a_training_with_its_work(tmp_path: Path) -> None:
    write_version(tmp_path)
    request = request_of(tmp_path, "mesh")
    answer = call_on_ranks(told_on_a_rank, 2, "task", {"dp_shard": 2}, request, 5)[0]
    assert (answer["stopped"], answer["steps"], answer["work"]) == (True, 5, 5 / 12)
    _, update = in_one_process(tmp_path, local={"max_steps": 5})
    assert distance(update_in(tmp_path / "mesh", answer["parts"]), update) < 1e-6
    with pytest.raises(RankFailed, match="OutOfTime: no time for the first of 12 steps"):
        call_on_ranks(told_on_a_rank, 2, "task", {"dp_shard": 2}, request, 0)
