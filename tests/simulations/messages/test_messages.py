"""Simulated runs of messages: the program is a real process, its clients live in virtual time."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.operations.load import load_user_task
from atoll.protocol.settings import ConfigError
from atoll.simulations.messages import answering
from atoll.simulations.messages.run import opened, setting_of
from tests.cli.federation import wait_for
from tests.federation.processes import ATOLL
from tests.simulations.federation import line_task
from tests.simulations.messages.simulating import PROGRAM, TASK, exchanges, settings, simulate

pytestmark = pytest.mark.real


def test_a_run_sends_answers_and_ends_with_a_record(tmp_path):
    result = simulate(tmp_path)
    assert (result["state"], result["cause"]) == ("finished", "main() returned after 1 exchange")
    assert (result["answers"], result["messages"], result["engine"]) == (3, 3, "sequential")
    assert (tmp_path / "program" / "replied").read_text() == "east north south"
    (exchange,) = exchanges(tmp_path)
    assert exchange["sentence"].endswith("(all_answered): 3 replied")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"SHA256SUMS", "exchanges.jsonl", "lock", "program", "program.log", "result.json", "run.toml"}


def test_several_processes_answer_with_the_same_bits(tmp_path):
    results = {engine: simulate(tmp_path / engine, f"simulation.engine={engine}", "simulation.workers=2")
               for engine in ("sequential", "processes")}  # fmt: skip
    assert results["processes"]["engine"] == "2 processes"
    assert exchanges(tmp_path / "processes") == exchanges(tmp_path / "sequential")


def test_devices_decide_who_replies_in_time(tmp_path):
    """One example takes 1 s on a device and 100 s on a straggler, and the program waits for 10 s of virtual time."""
    result = simulate(
        tmp_path,
        *("devices.examples_per_s=1", "devices.stragglers=0.34", "devices.slowdown=100", "seed=3"),
    )
    fates = [(message["fate"], message["detail"]) for message in exchanges(tmp_path)[0]["messages"]]
    assert sorted(fates) == [("failed", "the answer was not ready in time"), ("reported", ""), ("reported", "")]
    assert len((tmp_path / "program" / "replied").read_text().split()) == 2
    assert 9 <= result["virtual_s"] <= 10


def test_a_computation_that_takes_longer_than_its_message_may_is_not_ready_in_time(tmp_path, monkeypatch):
    """As at an agent: of 10 s, though the device is infinitely fast. A repeated run decides as the first one did."""
    clock = iter([0.0, 11.0, 11.0, 12.0, 12.0, 17.0])  # the beginning and the end of each answer
    monkeypatch.setattr(answering, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    result = simulate(tmp_path)
    fates = [(message["fate"], message["detail"]) for message in exchanges(tmp_path)[0]["messages"]]
    assert fates == [("failed", "the answer was not ready in time"), ("reported", ""), ("reported", "")]
    assert len((tmp_path / "program" / "replied").read_text().split()) == 2
    assert (result["state"], result["answers"]) == ("finished", 2)
    assert 9 <= result["virtual_s"] <= 10


def test_a_program_that_polls_waits_for_the_clients_not_for_the_clock(tmp_path):
    result = simulate(
        tmp_path,
        *("devices.availability=daily", "devices.awake_hours=13", "devices.begins_at=3", "seed=1"),
        program=f"{PROGRAM}:polls",
    )
    assert result["state"] == "finished", result
    assert (tmp_path / "program" / "replied").read_text() == "east north south"


def test_a_message_without_a_reply_has_the_reason_of_a_real_run(tmp_path):
    simulate(tmp_path, program=f"{PROGRAM}:errors")
    assert (tmp_path / "program" / "errors").read_text().splitlines() == [
        "ValueError: east has no answer",
        "left: no such node is here",
    ]


@pytest.mark.parametrize(
    ("main", "cause"),
    [
        ("raises", "RuntimeError: no strategy today (talking_program.py, line 34)"),
        ("dies", "the process of the server program died 4 times without a new exchange in between"),
    ],
)
def test_the_end_of_a_program_is_the_cause_of_the_end(tmp_path, main, cause):
    result = simulate(tmp_path, program=f"{PROGRAM}:{main}")
    assert (result["state"], result["cause"]) == ("failed", cause)


@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_a_killed_run_goes_on_and_computes_no_answer_again_that_is_whole(tmp_path, engine):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    (undisturbed / "go_on").touch()
    given = (f"{PROGRAM}:goes_on", f"simulation.engine={engine}", "simulation.workers=2")
    simulate(undisturbed, *given[1:], program=given[0])
    overrides = ("name=talk", *given[1:], f'program.main="{given[0]}"')
    command = [ATOLL, "simulate", TASK, "--out", killed, *(part for each in overrides for part in ("--set", each))]
    with subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL, start_new_session=True) as first:
        try:
            lines = killed / "exchanges.jsonl"
            wait_for(lambda: lines.exists() and lines.read_text().count("\n") == 3)
        finally:
            os.killpg(first.pid, signal.SIGKILL)
    reply = killed / "replies" / "2.bin"
    reply.write_bytes(bytes([reply.read_bytes()[0] ^ 1]) + reply.read_bytes()[1:])
    (killed / "go_on").touch()
    again = subprocess.run([*map(str, command), "--json"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    result = json.loads(again.stdout)
    assert (result["answers"], result["repeated"]) == (12, 8), "all of before but the one whose bytes were damaged"
    assert "its program runs again, and gets the answers that it had" in " ".join(again.stderr.split())
    assert exchanges(killed) == exchanges(undisturbed)
    assert not (killed / "replies").exists()


def test_a_fault_of_the_folder_names_it_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rounds.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"^run: there is a run of rounds already; choose another --out"):
        opened(settings(), load_user_task(settings().task), Path("run")).__enter__()


def test_an_interrupted_run_with_other_settings_begins_anew_and_an_ended_one_is_kept(tmp_path):
    file = settings(program=f"{PROGRAM}:sleeps")
    task, told = load_user_task(file.task), []
    with opened(file, task, tmp_path) as federation:
        threading.Timer(2.0, federation.interrupt).start()
        assert federation.run()["state"] == "interrupted"
    with pytest.raises(ConfigError, match="there is a run already, which is interrupted"):
        opened(file, task, tmp_path, is_fresh=True).__enter__()
    with opened(settings(), task, tmp_path, tell=told.append) as federation:
        result = federation.run()
    assert (result["state"], result["repeated"]) == ("finished", 0)
    assert told == [f"the run in {tmp_path} was interrupted and had other settings (program.main): it starts again"]
    with pytest.raises(ConfigError, match="there is a run already, which is finished"):
        opened(file, task, tmp_path).__enter__()


def test_all_faults_of_the_settings_are_told_before_anything_runs(tmp_path):
    file = settings("simulation.engine=batched", "attack.kind=sign_flip", "attack.malicious=1")
    with pytest.raises(ConfigError) as caught:
        setting_of(file, line_task.task)
    told = "\n".join(caught.value.faults)
    assert "answers no messages: program.main needs a Flower app, or an ArrayTask with `message`" in told
    assert 'got "batched", which trains models; allowed in a run of messages: "sequential"' in told
    assert "attack.kind: got 'sign_flip'" in told
    with pytest.raises(ConfigError, match="got 4; allowed: at most 3, the number of clients"):
        setting_of(settings("round.min_available=4"), load_user_task(file.task))
    assert not (tmp_path / "run.toml").exists()
