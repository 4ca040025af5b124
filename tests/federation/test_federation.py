"""The whole thing as a user runs it: processes, sockets, kill -9."""

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from atoll.server.views.views import View, look
from atoll.tensors.safetensors_file import read
from tests.cli.invoking import said
from tests.federation.processes import federation
from tests.warm.start import COLD

GIB = 1 << 30


def model(it, version):
    return read(it.state / "runs" / "trouble-1" / "versions" / f"{version:06d}.safetensors")["w"]


def test_federation_of_three_finishes_and_every_process_ends_by_itself(tmp_path):
    """The coordinator, an agent and its worker begin by an exec."""
    with federation(tmp_path) as it:
        it.coordinator(round__cohort_size=3, rounds=3, environment={COLD: "1"})
        it.agent("a", environment={COLD: "1"})
        it.agent("b")
        it.agent("c")
        assert it.wait_for_end() == 0
        for site in "abc":
            assert it.wait_for_end(site) == 0
        np.testing.assert_array_equal(model(it, 3), np.full(50_000, 3, np.float32))
        rows = it.history().evaluations("trouble-1")
        assert {row.version: row.statistics["mean"] for row in rows} == {v: (v * 100.0, 100.0) for v in (1, 2, 3)}


WITHOUT_GOODBYE = "the last process ended without a clean exit"


def test_a_coordinator_killed_in_mid_round_goes_on_with_the_updates_it_had(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(round__cohort_size=3)
        it.agent("a")
        it.agent("b")
        it.agent("c", upload_limit=60_000)  # 200 kB: more than three seconds

        it.hold_in_mid_upload("c", 1, "state/runs/trouble-1/incoming/*.bin", 200_000)
        it.kill("coordinator")
        it.running["c"].send_signal(signal.SIGCONT)
        before = it.open_round()
        kept = {c: r.digest for c, r in before.clients.items() if r.digest}
        assert before.round_id == 1
        assert len(kept) == 2
        it.coordinator(round__cohort_size=3)
        assert it.wait_for_end() == 0
        first = it.rounds()[0]
        assert first.phase == "committed"
        assert {c: first.clients[c].digest for c in kept} == kept
        assert len(first.outages) == 1
        assert "will resume where it stopped" in it.log("c")
        assert it.log("coordinator").count(WITHOUT_GOODBYE) == 1
        assert "recovered: trouble-1 at round 1 (collecting, updates kept: 2)" in it.log("coordinator")
        np.testing.assert_array_equal(model(it, 2), np.full(50_000, 2, np.float32))


def test_agent_killed_with_a_finished_update_sends_it_after_its_restart(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(round__cohort_size=2, rounds=1)
        it.agent("a")
        it.agent("b", upload_limit=20_000)
        it.wait_for(lambda: "uploading" in it.log("b") or None)
        time.sleep(0.5)
        it.kill("b")
        it.agent("b")
        assert it.wait_for_end() == 0
        log = it.log("b")
        assert "1 finished updates of an earlier process" in log
        assert log.count("trained 10 examples") == 1, "it must not train again"
        assert log.count(WITHOUT_GOODBYE) == 1
        assert "recovered: 1 finished update" in log
        assert WITHOUT_GOODBYE not in it.log("a") + it.log("coordinator")


def test_user_code_that_fails_costs_only_that_clients_round(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(round__cohort_size=4, round__quorum=1, round__failure_rest=0, rounds=2)
        for site in ("a", "crash", "raise", "nan"):
            it.agent(site)
        assert it.wait_for_end() == 0
        for record in it.rounds():
            reasons = {c: r.reason for c, r in record.clients.items()}
            assert reasons == {
                "a": "",
                "crash": "worker_crashed",
                "raise": "training_failed",
                "nan": "not_finite",
            }
            assert "the scanner is broken" in record.clients["raise"].detail
        for site in ("a", "crash", "raise", "nan"):
            assert it.wait_for_end(site) == 0


AGAIN = {"round__retry": 1000, "round__retry_wait": 0.1, "round__failure_rest": 0}
"""A round whose site needs longer than the deadline, as on a busy machine, is tried again."""


def test_hanging_worker_is_killed_after_its_lease_and_the_agent_lives(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(round__cohort_size=2, round__quorum=1, rounds=2, round__deadline=4, **AGAIN)
        it.agent("a")
        it.agent("hang", lease=2.0)
        assert it.wait_for_end() == 0
        committed = [record for record in it.rounds() if record.phase == "committed"]
        assert {record.close_reason for record in committed} == {"deadline"}
        assert {record.clients["hang"].fate for record in committed} == {"straggler"}
        assert it.wait_for_end("hang") == 0, "the agent continues without its worker"


def test_slow_client_stops_in_time_and_submits_part_of_its_work(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(
            round__cohort_size=2, rounds=1, round__deadline=7, round__grace=60, round__partial_work="scaled", **AGAIN
        )
        it.agent("a")
        it.agent("slow")
        assert it.wait_for_end() == 0
        record = it.rounds()[-1]
        assert record.phase == "committed"
        assert {row.fate for row in record.clients.values()} == {"reported"}
        assert 0 < record.clients["slow"].work <= 7 / (200 * 0.05)


def test_clients_evaluate_on_their_own_data_and_the_sums_are_merged(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(round__cohort_size=2, rounds=1, evaluation__clients_every=1, evaluation__server_every=0)
        it.agent("a")
        it.agent("b")
        assert it.wait_for_end() == 0
        (row,) = it.history().evaluations("trouble-1")
        assert (row.source, row.num_clients, row.statistics["mean"]) == ("clients", 2, (30.0, 30.0))


def test_agent_refuses_a_task_that_its_operator_did_not_allow(tmp_path):
    other = tmp_path / "other.py"
    other.write_text(Path(__file__).with_name("misbehaving_sites_task.py").read_text())
    with federation(tmp_path) as it:
        it.agent("a", tasks=[f"{other}:task"])  # first: the coordinator waits for seconds alone
        it.wait_for(lambda: "no connection" in it.log("a"))
        it.coordinator(round__cohort_size=1, rounds=1, round__selection_timeout=1, wait__most=5, wait__then="fail")
        assert it.wait_for_end() == 1
        assert "misbehaving_sites_task:task" in it.log("a")
        assert "other:task" in it.log("a")
        assert it.rounds()[0].abandon_reason == "too_few_clients"


def test_a_run_waits_for_its_first_sites_and_names_the_one_that_goes_away(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(
            round__cohort_size=2,
            rounds=20,
            pause=0.2,
            round__selection_timeout=1,
            round__retry=0,
            round__retry_wait=0.1,
            coordinator__lease=3.0,
        )

        def shown(*missing):
            (row,) = look(it.history(), View.RUNS)
            sites = [one["site"] for one in (row["wait"] or {}).get("missing", ())]
            return row["state"] == "waiting" and row["wait"]["cause"] == "too_few_clients" and sites == [*missing]

        it.wait_for(lambda: "no client has joined yet" in it.log("coordinator") and shown())
        said("client", "invite", "late", "--state", it.state)
        it.wait_for(lambda: shown("late"))
        assert "late (invited, has not enrolled)" in look(it.history(), View.RUNS)[0]["cause"]
        it.agent("a")
        it.agent("b")
        it.wait_for(lambda: "committed as version" in it.log("coordinator"))
        it.kill("b")
        it.wait_for(lambda: shown("b", "late"))
        it.agent("b")
        assert it.wait_for_end() == 0
        assert {record.abandon_reason for record in it.rounds()} <= {None, "awaits_clients"}


def test_a_full_disk_is_named_and_waited_for_and_the_round_commits_when_there_is_room(tmp_path):
    ballast = tmp_path / "ballast"
    if shutil.disk_usage(tmp_path).free < 4 * GIB:
        pytest.skip("the disk has no room for the file that fills it")
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, GIB)
    with federation(tmp_path) as it:
        free_min = shutil.disk_usage(tmp_path).free + GIB // 2
        it.coordinator(
            round__cohort_size=2, rounds=1, round__deadline=6, round__retry=0, coordinator__disk_free_min=free_min
        )
        it.agent("a")
        it.agent("b")
        it.wait_for(lambda: "waiting for room on disk" in it.log("coordinator"))
        time.sleep(7)  # beyond the deadline
        (row,) = look(it.history(), View.RUNS)
        assert (row["state"], row["wait"]["cause"]) == ("waiting", "disk")
        assert "does not fit" in row["cause"]
        ballast.unlink()
        assert it.wait_for_end() == 0
        assert [record.phase for record in it.rounds()] == ["committed"]


def test_run_below_its_quorum_fails_after_its_retries_with_the_cause(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(round__cohort_size=2, round__quorum=2, round__retry=1)
        it.agent("a")
        it.agent("raise")
        assert it.wait_for_end() == 1
        assert [r.abandon_reason for r in it.rounds()] == ["quorum_out_of_reach"] * 2
        run = it.history().run("trouble-1")
        assert run.state == "failed"
        assert "2 rounds in a row were abandoned" in run.cause


def test_what_happened_can_be_read_in_plain_sentences_and_as_json(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(round__cohort_size=2, round__quorum=1, rounds=1)
        it.agent("a")
        it.agent("raise")
        assert it.wait_for_end() == 0
        shown = it.show("round", "show", "1")
        assert "the scanner is broken" in str(shown)
        assert it.show("run", "list")
        assert len(it.show("client", "list")) == 2


def peak_memory_of_coordinator(folder, num_elements):
    """VmHWM [MiB] of a coordinator that has committed two rounds of three clients with a model of this size."""
    folder.mkdir()
    size = {"TROUBLE_ELEMENTS": str(num_elements)}
    with federation(folder) as it:
        process = it.coordinator(round__cohort_size=3, rounds=2, environment=size, stay=True)
        for site in "abc":
            it.agent(site, environment=size)
        it.wait_for(lambda: it.state.exists() and len(it.rounds()) == 2 and it.history().run("trouble-1").ended_at)
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


@pytest.mark.usefixtures("cold_start")
@pytest.mark.long
def test_coordinators_memory_does_not_grow_with_the_model_beyond_its_buffers(tmp_path):
    small = peak_memory_of_coordinator(tmp_path / "small", 8_000_000)  # 32 MB: more than every buffer
    large = peak_memory_of_coordinator(tmp_path / "large", 32_000_000)  # 128 MB, three updates of it a round
    assert large - small < 48, (small, large)  # MiB: half of what one copy of the model has grown by
