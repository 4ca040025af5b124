import json
import multiprocessing
import signal
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.ground.file_digest import SUMS, read_sums, sums_text
from atoll.parallel.checkpoint.errors import CheckpointBroken
from atoll.parallel.checkpoint.store import Store, read_about, reading, steps_to_keep
from atoll.parallel.engine.forked import FROZEN, PRELOAD
from tests.parallel.checkpoint.killed import die_at, publish, replace_and_retire


@given(st.sets(st.integers(0, 99), min_size=1), st.integers(1, 5), st.none() | st.integers(1, 30), st.data())
def test_the_newest_and_all_that_were_promised_stay(
    steps: set[int], keep: int, every: int | None, data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(sorted(steps)))
    kept = steps_to_keep(steps, newest, keep, every)
    assert newest in kept
    for step in steps:
        num_later = sum(step < other <= newest for other in steps)
        is_promised = step > newest or num_later < keep or (every is not None and step % every == 0)
        assert (step in kept) == is_promised


def test_the_last_ones_stay_and_those_of_every_so_many_steps(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2, every=40)
    for step in range(10, 101, 10):
        publish(store, step)
    assert store.steps() == [40, 80, 90, 100]
    assert store.latest() == tmp_path / "step-00000100"
    assert sorted(path.name for path in tmp_path.iterdir() if not path.is_dir()) == ["latest"]


def test_a_run_that_was_sent_back_leaves_what_lies_ahead_alone(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    for step in (10, 30, 20):
        publish(store, step)
    assert store.steps() == [20, 30]
    assert store.latest() == store.path(20)


def test_what_is_being_read_is_not_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    with reading(publish(store, 1)):
        publish(store, 2)
        assert store.steps() == [1, 2]
    publish(store, 3)
    assert store.steps() == [3]


def test_what_is_deleted_can_no_longer_be_read(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    first = publish(store, 1)
    publish(store, 2)
    with pytest.raises(CheckpointBroken, match=r"step-00000001 is not a complete checkpoint"), reading(first):
        pass


def test_the_same_step_again_replaces_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    publish(store, 5, "old")
    assert (publish(store, 5, "new") / ".metadata").read_text("utf-8") == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000005"]


@pytest.mark.parametrize("missing", [".metadata", "atoll.json", "SHA256SUMS"])
def test_a_folder_that_has_lost_one_of_its_tables_is_named_and_none_takes_its_place(
    tmp_path: Path, missing: str
) -> None:
    store = Store(tmp_path)
    publish(store, 1)
    (publish(store, 2) / missing).unlink()
    assert store.latest() == store.path(2)
    with pytest.raises(CheckpointBroken, match=f"not a complete checkpoint: it has no {missing}"):
        read_about(store.path(2))
    assert store.steps() == [1]


def test_without_its_name_the_highest_is_the_latest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.latest() is None
    for step in (1, 2):
        publish(store, step)
    (tmp_path / "latest").unlink()
    assert store.latest() == store.path(2)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = publish(Store(tmp_path), 1)
    text = json.dumps({"format": 1, "step": 1})
    (path / "atoll.json").write_text(text, "utf-8")
    (path / SUMS).write_text(sums_text(read_sums(path) | {"atoll.json": sha256(text.encode()).hexdigest()}), "utf-8")
    with pytest.raises(CheckpointBroken, match="has format 1, this program reads format 2"):
        read_about(path)


@pytest.mark.parametrize(("keep", "every"), [(0, None), (1, 0)])
def test_a_retention_that_keeps_nothing_is_refused(tmp_path: Path, keep: int, every: int | None) -> None:
    with pytest.raises(ValueError, match=f"keep={keep}, every={every}"):
        Store(tmp_path, keep, every)


@pytest.mark.real
def test_a_kill_at_any_instant_leaves_a_complete_latest_one(tmp_path: Path) -> None:
    """The file system is touched some forty times while one checkpoint is replaced and another retired."""
    context, number, seen = multiprocessing.get_context("forkserver"), 0, set()
    context.set_forkserver_preload([*PRELOAD, FROZEN])
    while True:
        number += 1
        folder = tmp_path / str(number)
        store = Store(folder, keep=2)
        for step in (1, 2):
            publish(store, step, str(step))
        process = context.Process(target=die_at, args=(folder, number, replace_and_retire))
        process.start()
        process.join()
        latest = store.latest()
        assert latest is not None
        state = (latest.name, (latest / ".metadata").read_text("utf-8"))
        assert read_about(latest)["step"] == int(latest.name[-8:])
        assert state in {
            ("step-00000001", "1"),
            ("step-00000002", "2"),
            ("step-00000002", "again"),
            ("step-00000003", "third"),
        }
        seen.add(state[1])
        publish(store, 4, "next")
        assert store.latest() == store.path(4)
        assert not [path for path in folder.iterdir() if path.suffix]
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert {"2", "again", "third"} <= seen
    assert number > 20
