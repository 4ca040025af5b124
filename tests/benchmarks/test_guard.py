"""The guard of the speed: its verdicts, its base, its worktree; the measurement itself with sides that only sleep."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks import guard
from benchmarks.guard import Found, Turn, base_of, found_of, worktree
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[2]


def turns(*cpu_s, num_bytes=0.0):
    return [Turn(each, 2 * each, num_bytes) for each in cpu_s]


def test_a_figure_is_the_base_over_the_checkout_in_processor_time():
    found = found_of(turns(1.0, 1.0, 3.0), turns(2.0, 1.0, 2.0), turns(3.0, 1.0, 1.0))
    assert found.speed == [1.0, 1.0, 1.0]
    assert found.itself == [1 / 3, 1.0, 3.0]
    assert found.memory == []


def test_memory_counts_where_it_is_measured():
    found = found_of(turns(1.0, num_bytes=100.0), turns(1.0, num_bytes=110.0), turns(1.0, num_bytes=98.0))
    assert found.memory == [pytest.approx(0.9)]
    bars = guard.bars_of("step", found)
    assert [(bar.name, bar.ok) for bar in bars] == [
        ("step: speed over the base's", True),
        ("step: the base's memory over ours", False),
    ]


@pytest.mark.parametrize(
    ("speed", "itself", "verdict"),
    [
        ([0.98, 0.97, 1.0], [1.0, 1.01, 0.99], "ok"),
        ([0.90, 0.91, 0.92], [1.0, 1.01, 0.99], "slower"),
        ([0.90, 0.91, 0.92], [0.9, 1.0, 1.1], "noise"),
        ([0.90, 0.91, 0.92], [1.05, 1.06, 1.07], "noise"),
        ([1.10, 1.20, 1.30], [0.5, 1.0, 2.0], "ok"),
    ],
)
def test_a_figure_below_the_bar_is_noise_where_the_base_is_as_far_from_itself(speed, itself, verdict):
    found = Found(speed=speed, real=speed, itself=itself)
    assert found.verdict == verdict
    [bar] = guard.bars_of("fold", found)
    assert bar.ok is (verdict == "ok")
    assert ("(noise)" in bar.name) is (verdict == "noise")


@pytest.fixture
def repository(tmp_path):
    def git(*words):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *words],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def commit(text):
        (tmp_path / "file").write_text(text)
        git("add", "file")
        git("commit", "-qm", text)
        return git("rev-parse", "HEAD")

    git("init", "-q")
    return git, commit, tmp_path


def test_the_base_is_where_the_branch_left_main(repository):
    git, commit, root = repository
    first, second = commit("1"), commit("2")
    assert base_of(None, root) == first  # no origin/main, and nothing has changed since HEAD
    (root / "file").write_text("changed")
    assert base_of(None, root) == second
    git("update-ref", "refs/remotes/origin/main", second)
    third, fourth = commit("3"), commit("4")
    assert base_of(None, root) == second
    assert base_of("HEAD~1", root) == third
    git("update-ref", "refs/remotes/origin/main", fourth)
    assert base_of(None, root) == third
    with pytest.raises(SystemExit, match="nowhere"):
        base_of("nowhere", root)


def test_the_worktree_ends_with_its_block_however_it_ends(repository):
    git, commit, root = repository
    first = commit("1")
    commit("2")
    with pytest.raises(KeyboardInterrupt), worktree(first, root) as tree:  # noqa: PT012 - the block is the subject
        assert (tree / "file").read_text() == "1"
        raise KeyboardInterrupt
    assert not tree.parent.exists()
    assert len(git("worktree", "list").splitlines()) == 1


SIDE = """
import json, sys, time
print('@ {"ready": true}', flush=True)
for line in sys.stdin:
    begun = time.process_time()
    while time.process_time() < begun + COST: pass
    print('@ ' + json.dumps({"units": 1, "seconds": COST}), flush=True)
"""


@pytest.mark.real
def test_three_sides_take_turns(monkeypatch, tmp_path):
    monkeypatch.setitem(guard.COMMANDS, "fold", [sys.executable, "-c", SIDE.replace("COST", "0.1")])
    found = guard.measure("fold", tmp_path, turns=2, seconds=0.0)
    assert len(found.speed) == len(found.itself) == 2
    assert all(0.3 < ratio < 3 for ratio in found.speed)


@pytest.mark.real
def test_a_side_that_the_base_lacks_is_not_measured(monkeypatch, tmp_path):
    command = [sys.executable, "-c", "import benchmarks_of_another_day"]
    monkeypatch.setitem(guard.COMMANDS, "fold", command)
    with pytest.raises(guard.NotMeasured, match="No module named 'benchmarks_of_another_day'"):
        guard.measure("fold", tmp_path, turns=1, seconds=0.0)


@pytest.mark.real
def test_a_signal_ends_the_guard_with_its_worktree_and_its_sides(repository):
    git, commit, root = repository
    commit("1")
    commit("2")
    program = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from benchmarks import guard
        here, of, checked_out = Path({str(root)!r}), guard.base_of, guard.worktree
        guard.base_of = lambda given: of(given, here)
        guard.worktree = lambda commit: checked_out(commit, here)
        guard.COMMANDS["fold"] = [sys.executable, "-c", "import time; print('@ {{}}', flush=True); time.sleep(600)"]
        sys.exit(guard.main(["--only", "fold"]))
        """)
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: len(git("worktree", "list").splitlines()) == 2)
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(BOUND_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert len(git("worktree", "list").splitlines()) == 1
    assert not {path.name for path in Path(tempfile.gettempdir()).glob(f"{guard.WORKTREE}tree-{process.pid}-*")}


def wait_until(is_true):
    by = time.monotonic() + BOUND_S
    while not is_true():
        assert time.monotonic() < by
        time.sleep(0.05)
