"""The aggregation on ranks as a user runs it: processes, sockets, kill -9, and always the bits of one process alone."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from atoll.cli import admin
from atoll.protocol.vocabulary import RunState
from atoll.server.statedir import running_coordinator
from tests.federation.processes import ATOLL, Federation, federation

TASK = str(Path(__file__).with_name("sharded.py")) + ":task"
SITES = ("a", "b", "c")
RUNS = {
    "mean": "rounds = 3",
    "adam": 'rounds = 2\noptimizer.name = "fedadam"',
    "krum": 'rounds = 1\naggregation = {rule = "multi_krum", malicious = 0, num_selected = 2}',
}
MODEL_BYTES = 4 * (1 << 22)
ACCUMULATOR_BYTES = 2 * MODEL_BYTES


def digests(it, run_id="trouble-1"):
    return [row.digest for row in it.history().versions(run_id)]


def is_finished(it, name):
    try:
        return it.history().run(name).state is RunState.FINISHED
    except LookupError:
        return False


def rows_of(it):
    """What the ranks have done, and how much the coordinator itself has received."""
    reply = admin.ranks(it.state)
    return list(reply.ranks), reply.received_bytes


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run_all(folder, num_ranks, names):
    """The digests of all versions of these runs, and whatever else is to be the same for any number of ranks."""
    folder.mkdir()
    with federation(folder, task=TASK) as it:
        fixed = {"coordinator__aggregators": num_ranks, "coordinator__keep_versions": 2}
        it.coordinator(name=names[0], rounds=3, round__cohort_size=3, stay=True, **fixed)
        for site in SITES:
            it.agent(site, exit_when_done=False)
        it.wait_for(lambda: running_coordinator(it.state))
        for name in names[1:]:
            admin.start(it.state, f'task = "{TASK}"\nname = "{name}"\nround.cohort_size = 3\n{RUNS[name]}')
        it.wait_for(lambda: all(is_finished(it, name) for name in names), timeout=90)
        found = {
            "digests": {name: digests(it, f"{name}-1") for name in names},
            "measured": {name: [row.statistics for row in it.history().evaluations(f"{name}-1")] for name in names},
        }
        time.sleep(1.1)  # the ranks report once a second
        look(it, num_ranks, folder, names)
    return found


def look(it, num_ranks, folder, names):
    """What is true of a federation on ranks when all of its rounds are committed."""
    rows, received = rows_of(it)
    updates = {"mean": 3, "adam": 2, "krum": 1}
    total = sum(updates[name] for name in names) * len(SITES) * (MODEL_BYTES + 28 + 8)
    assert len(rows) == num_ranks
    assert received + sum(row.received_bytes for row in rows) == total, "each update is received once"
    if num_ranks:
        assert received == 0
        assert all(row.received_bytes > 0 and row.sent_bytes > 0 for row in rows[: len(SITES)])
    if num_ranks > 1:
        senders = min(num_ranks, len(SITES))  # a rank without an update of the round has nothing to say
        optimum = senders * (num_ranks - 1) / num_ranks * ACCUMULATOR_BYTES * (updates["mean"] + updates["adam"])
        assert sum(row.exchanged_bytes for row in rows) > 0.99 * optimum
    shards = sorted(it.state.glob("aggregators/*/runs/mean-1/*/*.safetensors"))
    assert len(shards) == 3 * num_ranks, "old versions go at every rank"
    assert {path.name[:6] for path in shards} <= {"000000", "000002", "000003"}
    assert not list(it.state.glob("aggregators/*/runs/*/*/*.bin")), "updates go at every rank"
    if num_ranks == 2:
        look_at_the_commands(it, folder)


def look_at_the_commands(it, folder):
    """The versions can be listed and exported while the ranks run, and when nothing runs any more."""
    listed = {row["version"]: row for row in it.show("model", "list", "--run", "mean")}
    assert {version for version, row in listed.items() if row["kept"]} == {0, 2, 3}
    assert {row["here"] for row in it.show("rank", "list")["ranks"]} == {True}
    gathered = it.state / "runs" / "mean-1" / "versions"
    assert {path.name[:6] for path in gathered.glob("*.safetensors")} == {"000000", "000002", "000003"}
    (gathered / "000003.safetensors").unlink()  # of the server's own test
    assert it.show("model", "list", "--run", "mean")[-1]["parts"] == 2
    elsewhere = it.state / "aggregators" / "0of2" / "runs"
    hidden = elsewhere.rename(it.folder / "on another machine")
    hidden.rename(elsewhere)
    it.show("model", "export", "--run", "mean", "--out", folder / "running.safetensors")
    pids = [int((path / "lock").read_text().split()[0]) for path in it.state.glob("aggregators/*")]
    it.running["coordinator"].terminate()
    assert it.wait_for_end() == 0
    assert not [pid for pid in pids if is_alive(pid)], "the ranks end with the coordinator"
    it.show("model", "export", "--run", "mean", "--out", folder / "ended.safetensors")
    assert (folder / "ended.safetensors").read_bytes() == (folder / "running.safetensors").read_bytes()
    elsewhere.rename(it.folder / "gone")
    done = subprocess.run(
        [ATOLL, "model", "export", "--run", "mean", "--out", folder / "x", "--state", it.state],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "lies in 2 parts, and aggregation rank 0, which has one of them, is away" in done.stderr
    assert not (folder / "x").exists()


def test_one_two_and_four_ranks_make_the_models_of_none_and_the_coordinator_receives_no_update(tmp_path):
    alone = run_all(tmp_path / "0", 0, list(RUNS))
    assert [len(found) for found in alone["digests"].values()] == [4, 3, 2]
    for num_ranks, names in ((1, ["mean"]), (2, list(RUNS)), (4, list(RUNS))):
        found = run_all(tmp_path / str(num_ranks), num_ranks, names)
        for what in ("digests", "measured"):
            assert found[what] == {name: alone[what][name] for name in names}, (num_ranks, what)
