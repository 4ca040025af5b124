"""The aggregation on ranks as a user runs it: processes, sockets, kill -9, and always the bits of one process alone."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from atoll.operations import admin
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.vocabulary import RunState
from atoll.server.journal.holder import running_coordinator
from benchmarks.members import equip
from tests.cli.invoking import faults_in, ran
from tests.cli.serving.test_full_disk import NAMESPACE, can_mount
from tests.federation.processes import ATOLL, Federation, ended_after, federation
from tests.turns import in_turn
from tests.waiting import BOUND_S
from tests.warm.start import COLD

TASK = str(Path(__file__).with_name("sharded_task.py")) + ":task"
SITES = ("a", "b", "c")
RUNS = {
    "mean": "rounds = 3",
    "adam": 'rounds = 2\noptimizer.name = "fedadam"',
    "krum": 'rounds = 1\naggregation = {rule = "multi_krum", malicious = 0, num_selected = 2}',
}
UPDATES = {"mean": 3, "adam": 2, "krum": 1}
"""Rounds of each run."""
MAX_CONNECTIONS = 7
MODEL_BYTES = 4 * (23 << 17)
UPDATE_BYTES = MODEL_BYTES + 8
ACCUMULATOR_BYTES = 2 * MODEL_BYTES


def digests(it, run_id="trouble-1"):
    return [row.digest for row in it.history().versions(run_id)]


def is_finished(it, name):
    try:
        return it.history().run(name).state is RunState.FINISHED
    except (LookupError, OSError):
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


def pids_of_ranks(it):
    """Of the ranks that the coordinator has started."""
    return [int((path / "lock").read_text().split()[0]) for path in it.state.glob("aggregators/*")]


def run_all(folder, num_ranks, names, *, is_killed=False):
    """The digests of all versions of these runs, and whatever else is to be the same for any number of ranks."""
    folder.mkdir()
    with federation(folder, task=TASK) as it:
        fixed = {
            "coordinator__aggregators": num_ranks,
            "coordinator__keep_versions": 2,
            "coordinator__max_connections": MAX_CONNECTIONS,
        }

        def start():
            """Start the coordinator and its ranks by an exec."""
            rules = {"rounds": 3, "round__cohort_size": 3, "environment": {COLD: "1"} if num_ranks else {}}
            it.coordinator(name=names[0], stay=True, **rules, **fixed)

        start()
        for site in SITES:
            it.agent(site, exit_when_done=False)
        it.wait_for(lambda: running_coordinator(it.state), every=0.1)
        for name in names[1:]:
            admin.start(it.state, f'task = "{TASK}"\nname = "{name}"\nround.cohort_size = 3\n{RUNS[name]}')
        if is_killed:
            it.wait_for(lambda: len(digests(it, "mean-1")) > 1, every=0.1)
            pids = pids_of_ranks(it)
            it.kill("coordinator")
            it.wait_for(lambda: not [pid for pid in pids if is_alive(pid)])  # they end with it, and come back with it
            start()
        it.wait_for(lambda: all(is_finished(it, name) for name in names), every=0.2)
        found = {
            "digests": {name: digests(it, f"{name}-1") for name in names},
            "measured": {name: [row.statistics for row in it.history().evaluations(f"{name}-1")] for name in names},
        }
        if is_killed:
            time.sleep(1.1)  # the ranks report once a second
        else:
            total = sum(UPDATES[name] for name in names) * len(SITES) * UPDATE_BYTES
            it.wait_for(lambda: received_by_all(it) == total and exchanged_by_all(it) > exchanged_at_least(num_ranks))
        look(it, num_ranks, names, is_killed=is_killed)
        if num_ranks == 2:
            look_at_the_commands(it)
    return found


def received_by_all(it):
    """Return the bytes that ranks and coordinator have received."""
    rows, received = rows_of(it)
    return received + sum(row.received_bytes for row in rows)


def exchanged_by_all(it):
    """Return the bytes that ranks have sent to each other."""
    return sum(row.exchanged_bytes for row in rows_of(it)[0])


def exchanged_at_least(num_ranks):
    """Return the bytes of the exchanges of two ranks: of each sum all ranks but its owner send a part."""
    return (num_ranks - 1) * ACCUMULATOR_BYTES * (UPDATES["mean"] + UPDATES["adam"]) if num_ranks == 2 else -1


def look(it, num_ranks, names, *, is_killed):
    """What is true of a federation on ranks when all of its rounds are committed."""
    rows, received = rows_of(it)
    assert len(rows) == num_ranks
    if num_ranks:
        assert received == 0
    if not is_killed:
        total = sum(UPDATES[name] for name in names) * len(SITES) * UPDATE_BYTES
        assert received + sum(row.received_bytes for row in rows) == total, "each update is received once"
        assert all(row.received_bytes > 0 and row.sent_bytes > 0 for row in rows)
    if num_ranks == 2 and not is_killed:
        assert sum(row.exchanged_bytes for row in rows) > exchanged_at_least(num_ranks)
    for pid in pids_of_ranks(it):
        assert f"--set=max_connections={MAX_CONNECTIONS}" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    shards = sorted(it.state.glob("aggregators/*/runs/mean-1/*/*.safetensors"))
    assert len(shards) == 3 * num_ranks, "old versions go at every rank"
    assert {path.name[:6] for path in shards} <= {"000000", "000002", "000003"}
    assert not list(it.state.glob("aggregators/*/runs/*/*/*.bin")), "updates go at every rank"


def look_at_the_commands(it):
    """The versions can be listed and exported while the ranks run, and when nothing runs any more."""
    folder = it.folder
    listed = {row["version"]: row for row in it.show("model", "list", "--run", "mean")}
    assert {version for version, row in listed.items() if row["kept"]} == {0, 2, 3}
    assert {row["here"] for row in it.show("rank", "list")["ranks"]} == {True}
    gathered = it.state / "runs" / "mean-1" / "versions"
    assert {path.name[:6] for path in gathered.glob("*.safetensors")} == {"000000", "000002", "000003"}
    (gathered / "000003.safetensors").unlink()  # of the server's own test
    assert it.show("model", "list", "--run", "mean")[-1]["parts"] == 2
    it.show("model", "export", "--run", "mean", "--out", folder / "running.safetensors")
    pids = pids_of_ranks(it)
    it.running["coordinator"].terminate()
    assert it.wait_for_end() == 0
    assert not [pid for pid in pids if is_alive(pid)], "the ranks end with the coordinator"
    it.show("model", "export", "--run", "mean", "--out", folder / "ended.safetensors")
    assert (folder / "ended.safetensors").read_bytes() == (folder / "running.safetensors").read_bytes()
    (it.state / "aggregators" / "0of2" / "runs").rename(it.folder / "gone")
    (line,) = ran(
        "model", "export", "--run", "mean", "--out", folder / "x", "--state", it.state, code=2
    ).stderr.splitlines()
    assert "is in 2 parts, and aggregation rank 0, which has one of them, is away" in line
    assert not (folder / "x").exists()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a coordinator without ranks makes."""
    return run_all(tmp_path_factory.mktemp("alone") / "0", 0, list(RUNS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        pytest.param(1, ["mean"], marks=pytest.mark.long),
        (2, list(RUNS)),
        pytest.param(4, list(RUNS), marks=pytest.mark.long),
    ],
)
def test_ranks_make_the_models_of_none_and_the_coordinator_receives_no_update(tmp_path, alone, num_ranks, names):
    assert [len(found) for found in alone["digests"].values()] == [4, 3, 2]
    found = run_all(tmp_path / str(num_ranks), num_ranks, names, is_killed=num_ranks == 4)
    for what in ("digests", "measured"):
        assert found[what] == {name: alone[what][name] for name in names}, what


# ---------------------------------------------------------------- deaths


class Ranked(Federation):
    """A federation whose ranks the test starts itself, each with a folder of its own."""

    def __init__(self, folder, num_ranks=2):
        super().__init__(folder, task=TASK)
        self.num_ranks = num_ranks

    def rank(self, number, **environment):
        equip(self.state, self.folder / f"rank{number}", Identity(Role.AGGREGATOR, str(number)))
        return self.start(
            f"rank{number}",
            *("aggregator", "--coordinator", self.address, "--rank", number, "--of", self.num_ranks),
            *("--state", self.folder / f"rank{number}"),
            **environment,
        )

    def rank_on_a_full_disk(self, number, free):
        """Start a rank whose state directory is a disk with so many free bytes; return the file that fills it."""
        folder, first = self.folder / f"rank{number}", self.folder / "first"
        equip(self.state, first, Identity(Role.AGGREGATOR, str(number)))
        folder.mkdir()
        size = 8 * MODEL_BYTES + 2**26  # which stay free
        fill = f'head -c {size - free} /dev/zero > "$0"/ballast'
        inside = f'mount -t tmpfs -o size={size} tmpfs "$0" && cp -r "$1"/. "$0" && {fill} && shift && exec "$@"'
        place = ("--coordinator", self.address, "--rank", number, "--of", self.num_ranks, "--state", folder)
        command = [*NAMESPACE, "sh", "-c", inside, folder, first, ATOLL, "aggregator", *place]
        with (self.folder / f"rank{number}.log").open("ab") as log:
            process = self.running[f"rank{number}"] = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)
        return Path(f"/proc/{process.pid}/root{folder}/ballast")

    def host(self, *, environment=(), **settings):
        fixed = {"round__cohort_size": 3, "round__deadline": 120, "evaluation__server_every": 0}
        fixed |= {"coordinator__aggregators": self.num_ranks, "coordinator__start_aggregators": False}
        return self.coordinator(environment=environment, **(fixed | settings))

    def wait_for(self, condition, timeout=BOUND_S, every=0.1):
        return super().wait_for(condition, timeout, every)

    def wait_for_death(self, name):
        self.wait_for(lambda: self.running[name].poll() == -signal.SIGKILL)

    def hold(self, round_id):
        """Stop agent c in the middle of its upload, and return the rank that receives it."""
        path = self.hold_in_mid_upload("c", round_id, "rank*/runs/trouble-1/incoming/*.bin", MODEL_BYTES)
        return path.relative_to(self.folder).parts[0]

    def go_on(self):
        """Let agent c go on."""
        self.running["c"].send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digests of three rounds of the run that is disturbed below."""
    with federation(tmp_path_factory.mktemp("undisturbed"), task=TASK) as it:
        it.coordinator(rounds=3, round__cohort_size=3, evaluation__server_every=0)
        for site in SITES:
            it.agent(site)
        assert it.wait_for_end() == 0
        return digests(it)


def check_that_all_count(record, before):
    """Check that a round counts all updates, among them the two that were accepted when `before` was read."""
    kept = {c: r.digest for c, r in before.clients.items() if r.digest}
    assert len(kept) == 2
    assert {c: record.clients[c].digest for c in kept} == kept, "what was accepted before counts"
    assert {client.used_in for client in record.clients.values()} == {1}


@pytest.mark.skipif(not can_mount(), reason="this machine lets no user mount a tmpfs")
@pytest.mark.parametrize(
    ("free", "deadline"),
    [
        in_turn(2**20, 120, number=0, days=2, id="version"),
        in_turn(MODEL_BYTES + 2**20, 20, number=1, days=2, id="update"),
    ],
)
def test_a_rank_without_room_lets_the_run_wait_and_no_deadline_passes(tmp_path, free, deadline):
    """An agent that has no model yet keeps the deadline that it was told."""
    with ended_after(Ranked(tmp_path, num_ranks=1)) as it:
        it.host(rounds=1, round__deadline=deadline, round__retry=0)
        it.wait_for(lambda: running_coordinator(it.state))
        ballast = it.rank_on_a_full_disk(0, free)
        it.wait_for(lambda: "aggregation rank 0 is connected" in it.log("coordinator"))
        for site in SITES:
            it.agent(site)
        it.wait_for(lambda: "aggregation rank 0: " in it.log("coordinator"))
        (row,) = it.show("run", "list")
        assert (row["state"], "aggregation rank 0: " in str(row)) == ("waiting", True)
        time.sleep(21)  # longer than the shorter deadline
        ballast.unlink()
        assert it.wait_for_end() == 0
        (record,) = it.rounds()
        assert (record.phase, len(record.clients)) == ("committed", 3)
        told = [line for line in it.log("rank0").splitlines() if "error: " in line]
        assert len(told) == 1, told
        assert "error: run trouble-1: " in told[0]


@pytest.mark.long
@pytest.mark.slow
def test_no_death_of_any_process_changes_the_models(tmp_path, undisturbed):
    with ended_after(Ranked(tmp_path)) as it:
        it.host(rounds=3)
        it.rank(0)
        it.rank(1, ATOLL_CRASH_AT="rank.mid_fold")
        for site in "ab":
            it.agent(site)
        it.agent("c", upload_limit=MODEL_BYTES // 2)

        victim = it.hold(1)  # a rank, while an update is on its way to it
        before = it.open_round()
        it.kill(victim)
        it.go_on()
        it.rank(int(victim[-1]), **({"ATOLL_CRASH_AT": "rank.mid_fold"} if victim == "rank1" else {}))
        it.wait_for_death("rank1")  # while it folds
        it.rank(1, ATOLL_CRASH_AT="rank.folded")
        it.wait_for_death("rank1")  # its shard is written, nobody knows
        it.rank(1)
        it.wait_for(lambda: len(digests(it)) == 2)
        check_that_all_count(it.rounds()[0], before)

        it.hold(2)
        it.kill("c")  # an agent, while it sends
        it.agent("c", upload_limit=MODEL_BYTES // 2)
        it.hold(2)
        it.kill("coordinator")  # in mid-round
        it.host(rounds=3)
        it.go_on()
        it.hold(2)
        it.running["rank1"].send_signal(signal.SIGSTOP)  # the other one will wait for it in the fold
        it.go_on()
        it.wait_for(lambda: it.rounds()[-1].phase == "aggregating")
        time.sleep(0.3)
        it.kill("coordinator")  # in mid-fold
        it.running["rank1"].send_signal(signal.SIGCONT)
        it.host(rounds=3, environment={"ATOLL_CRASH_AT": "aggregate.after_fold"})
        it.wait_for_death("coordinator")  # the ranks have the next version, the journal does not know it
        it.host(rounds=3)
        assert it.wait_for_end() == 0
        for site in SITES:
            assert it.wait_for_end(site) == 0
        assert digests(it) == undisturbed
        assert it.log("rank1").count("the last process ended without a clean exit") >= 2
        assert all(len(record.clients) == 3 for record in it.rounds())
        assert it.log("c").count("trained ") == 3, "no update is trained twice"


@pytest.mark.long
@pytest.mark.slow
def test_a_missing_rank_costs_the_round_and_another_number_of_ranks_is_refused(tmp_path):
    with ended_after(Ranked(tmp_path)) as it:
        it.host(rounds=1, round__retry=100, coordinator__aggregator_patience=1)
        it.rank(0)
        it.rank(1, ATOLL_CRASH_AT="rank.mid_fold")
        for site in SITES:
            it.agent(site)
        it.wait_for_death("rank1")
        first = it.wait_for(lambda: next((r for r in it.rounds() if r.abandon_reason), None))
        assert first.abandon_reason == "aggregation_failed"
        assert "aggregation rank 1 of 2 has been away for 1 s" in first.detail
        it.kill("coordinator")
        assert_refused(
            ("coordinator", TASK, "--state", it.state, "--aggregators", 3, "--set", "name=trouble"),
            "run trouble-1 was started with --aggregators 2, and its versions are there; this coordinator has 3: start "
            "it with --aggregators 2",
        )
        it.host(rounds=1, round__retry=100, coordinator__aggregator_patience=1)
        it.rank(1)
        assert it.wait_for_end() == 0
        committed = it.rounds()[-1]
        assert committed.phase == "committed"
        assert {client.used_in for client in committed.clients.values()} == {committed.round_id}
        it.running["rank0"].terminate()
        it.wait_for_end("rank0")
        place = ("--state", tmp_path / "rank0", "--coordinator", it.address)
        assert_refused(
            ("aggregator", *place, "--rank", 1, "--of", 2),
            f"{tmp_path / 'rank0'} belongs to rank 0 of 2, and cannot belong to rank 1 of 2: name another",
        )
        assert_refused(("aggregator", *place, "--rank", 0, "--of", 4), "belongs to rank 0 of 2")
        it.start("late", "aggregator", *place, "--rank", 0, "--of", 2)
        it.wait_for(lambda: f"no connection to the coordinator on {it.address}: UNAVAILABLE" in it.log("late") or None)
        assert it.running["late"].poll() is None, "it waits for the coordinator"


def assert_refused(command, fault):
    """One line, exit code 2."""
    told = ran(*command, code=2).stderr
    (line,) = faults_in(told)
    assert fault in line
    assert "Traceback" not in told


def test_what_cannot_be_is_said_in_one_line(tmp_path):
    assert_refused(
        ("coordinator", TASK, "--state", tmp_path / "s", "--aggregators", 65), "got 65; allowed: integer >= 0, <= 64"
    )
    rank = (
        "aggregator",
        "--coordinator",
        "127.0.0.1:1",
        "--rank",
        0,
        "--of",
        1,
        "--insecure",
        "--state",
        tmp_path / "r",
    )
    assert_refused((*rank, "--set", "interface=atoll0"), "interface 'atoll0': No such device (there are: lo")
    assert_refused(("aggregator", *rank[1:3], "--rank", 2, "--of", 2, "--state", tmp_path), "rank 2 is not in 0..1")
