"""Runs of messages: a server program, a coordinator and agents as processes, and kill -9 for each of them."""

import json
import re
import signal
from pathlib import Path

import pytest

from atoll.simulations.messages.run import opened
from tests.client.work import message_task
from tests.federation.processes import federation
from tests.simulations.messages.simulating import digests, exchanges, settings

PROGRAM = str(Path(__file__).with_name("message_program.py"))
TASK = str(Path(__file__).parents[1] / "client" / "work" / "message_task.py") + ":task"


def started(it, *, main="main", environment=(), **settings):
    it.coordinator(name="talk", program__main=f"{PROGRAM}:{main}", environment=environment, **settings)


def result(it):
    return json.loads((it.state / "runs" / "talk-1" / "program" / "result.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with federation(tmp_path_factory.mktemp("undisturbed"), task=TASK) as it:
        started(it)
        it.agent("north")
        it.agent("south")
        assert it.wait_for_end() == 0, it.log("coordinator")
        found = result(it)
        assert found["answers"] == [{"to": "north"}, {"to": "south"}]
        assert all("has no answer" in error for error in found["errors"])
        shown = it.show("run", "show", "talk-1")
        rows = it.show("client", "list")
        return found | {"shown": shown, "clients": rows, "runs": it.show("run", "list")}


def test_a_program_exchanges_messages_with_its_sites(undisturbed):
    assert len(undisturbed["errors"]) == 2
    (run,) = undisturbed["runs"]
    assert (run["state"], run["cause"]) == ("finished", "main() returned after 13 exchanges")
    exchanges = undisturbed["shown"]["exchanges"]
    assert [exchange["exchange"] for exchange in exchanges] == [*range(1, 14)]
    assert {message["fate"] for exchange in exchanges[:12] for message in exchange["messages"]} == {"reported"}
    contents = [message["content"] for message in exchanges[0]["messages"]]
    assert contents[0] == contents[1], "a content for two nodes is stored once"
    assert exchanges[-1]["sentence"].endswith("(all_answered): 2 failed")
    replied = {row["client"]: (row["invited"], row["used"]) for row in undisturbed["clients"]}
    assert replied == {"north": (12, 11), "south": (12, 11)}


def test_a_simulation_has_the_digests_of_real_agents(tmp_path, undisturbed, monkeypatch):
    """The program dies on the way, too: the simulator starts it again and repeats its answers."""
    monkeypatch.setenv("DIES_AT", "step 4")
    task = message_task.Answering()
    task.sites = ("north", "south")
    with opened(settings("name=talk", program=f"{PROGRAM}:main"), task, tmp_path) as federation:
        assert federation.run()["cause"] == "main() returned after 13 exchanges"
    assert (tmp_path / "program" / "died").read_text() == "step 4"
    found = json.loads((tmp_path / "program" / "result.json").read_text())
    assert [found[key] for key in ("seen", "answers")] == [undisturbed[key] for key in ("seen", "answers")]
    assert [error.splitlines()[-1] for error in found["errors"]] == [
        "ValueError: north has no answer",
        "ValueError: south has no answer",
    ]
    assert digests(exchanges(tmp_path))[:10] == digests(undisturbed["shown"]["exchanges"])[:10]


@pytest.mark.parametrize("place", ["step 4", "threads"])
def test_a_program_that_is_killed_goes_on_with_the_same_digests(place, tmp_path, undisturbed):
    with federation(tmp_path, task=TASK) as it:
        started(it, environment={"DIES_AT": place})
        it.agent("north")
        it.agent("south")
        assert it.wait_for_end() == 0, it.log("coordinator")
        assert (it.state / "runs" / "talk-1" / "program" / "died").read_text() == place
        assert result(it) == {key: undisturbed[key] for key in ("seen", "answers", "errors")}
        assert "the process of the server program has died" in it.log("coordinator")
        assert it.log("north").count("answered message") == 11, "nothing is asked of a site twice"


def test_a_killed_coordinator_and_a_killed_agent_change_nothing(tmp_path, undisturbed):
    with federation(tmp_path, task=TASK) as it:
        started(it)
        it.agent("north")
        it.agent("south")
        for number, name in ((3, "coordinator"), (6, "south"), (9, "coordinator")):
            it.wait_for(lambda number=number: f"exchange {number}: " in it.log("coordinator"))
            it.kill(name)
            started(it) if name == "coordinator" else it.agent(name)
        assert it.wait_for_end() == 0, it.log("coordinator")
        assert result(it) == {key: undisturbed[key] for key in ("seen", "answers", "errors")}
        assert "the server program begins again" in it.log("coordinator")


def test_a_node_that_reconnects_late_after_a_kill_of_the_coordinator_is_asked_as_before(tmp_path, undisturbed):
    with federation(tmp_path, task=TASK) as it:
        started(it, environment={"WAITS_AT": "step 4"})
        it.agent("north")
        it.agent("south")
        it.wait_for((it.state / "runs" / "talk-1" / "program" / "waits").exists)
        it.kill("coordinator")
        it.running["south"].send_signal(signal.SIGSTOP)
        started(it)
        next_one = it.wait_for(lambda: re.search(r"exchange 6: (.*) sent", it.log("coordinator")))
        it.running["south"].send_signal(signal.SIGCONT)
        assert next_one[1] == "2 messages (train)"
        assert it.wait_for_end() == 0, it.log("coordinator")
        assert result(it) == {key: undisturbed[key] for key in ("seen", "answers", "errors")}


def test_another_program_after_a_kill_ends_the_run_and_says_where(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        started(it, main="changed", environment={"DIES_AT": "changed"})
        it.agent("north")
        assert it.wait_for_end() != 0
        log = it.log("coordinator")
        assert "the run is failed: exchange 2: message 1 of 1 was train to north with content" in log
        assert "the server program is another one than before" in log


def test_what_the_program_raises_is_the_cause_of_the_end(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        started(it, main="raises")
        assert it.wait_for_end() != 0
        assert "the run is failed: RuntimeError: no strategy today (message_program.py, line" in it.log("coordinator")
