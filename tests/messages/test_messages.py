"""Runs of messages: a server program, a coordinator and agents as processes, and kill -9 for each of them."""

import json
import re
import signal
from pathlib import Path

import pytest

import atoll
from atoll.ground.process.crash_points import VARIABLE
from atoll.simulations.messages.run import opened
from tests.cli.invoking import ran
from tests.client.work import message_task
from tests.federation.processes import federation
from tests.simulations.messages.simulating import digests, exchanges, settings
from tests.waiting import BOUND_S

PROGRAM = str(Path(__file__).with_name("message_program.py"))
TASK = str(Path(__file__).parents[1] / "client" / "work" / "message_task.py") + ":task"


def started(it, *, main="main", environment=(), **settings):
    it.coordinator(name="talk", program__main=f"{PROGRAM}:{main}", environment=environment, **settings)


def result(it):
    return json.loads((it.state / "runs" / "talk-1" / "program" / "result.json").read_text())


def closed(event):
    return [record for record in event.records if record["ended_at"] is not None]


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
        return found | {
            "shown": it.show("run", "show", "talk-1"),
            "runs": it.show("run", "list"),
            "clients": it.show("client", "list"),
            "exchanges": it.show("round", "list"),
            "first": it.show("round", "show", "1"),
            "last": it.show("round", "show"),
            "documents": [r for e in atoll.connect(it.state).run("talk").follow(after=0) for r in closed(e)],
            "state": it.state,
        }


def test_a_program_exchanges_messages_with_its_sites(undisturbed):
    assert len(undisturbed["errors"]) == 2
    (run,) = undisturbed["runs"]
    assert (run["state"], run["cause"]) == ("finished", "main() returned after 13 exchanges")
    assert run["exchanges"] == undisturbed["shown"]["exchanges"] == 13
    first = undisturbed["first"]
    assert {message["fate"] for message in first["messages"]} == {"reported"}
    contents = [message["content"] for message in first["messages"]]
    assert contents[0] == contents[1], "a content for two nodes is stored once"
    replied = {row["client"]: (row["invited"], row["used"]) for row in undisturbed["clients"]}
    assert replied == {"north": (12, 11), "south": (12, 11)}


def test_the_views_of_a_run_have_its_exchanges(undisturbed):
    rows = undisturbed["exchanges"]
    assert [row["round"] for row in rows] == [*range(1, 14)]
    assert {row["phase"] for row in rows} == {"closed"}
    assert [row["kinds"] for row in rows[-3:]] == [["query.stats"], ["query.stats"], ["query.fail"]]
    assert (rows[0]["nodes"], rows[0]["reported"], rows[0]["missing"], rows[0]["errors"]) == (2, 2, 0, {})
    assert rows[0]["bytes_down"] > 16_000 < rows[0]["bytes_up"], "1000 numbers of 8 bytes, twice"
    assert rows[-1]["errors"] == {"training_failed": 2}
    assert undisturbed["first"]["sentences"][0].startswith("Exchange 1 sent 2 messages (train) to 2 nodes and closed")
    assert "from north, south." in undisturbed["first"]["sentences"][1]
    failed = [one for one in undisturbed["last"]["sentences"] if "has no answer" in one]
    assert [one.split()[0] for one in failed] == ["north", "south"]


def test_the_python_interface_and_an_export_have_the_exchanges(tmp_path, undisturbed):
    run = atoll.connect(undisturbed["state"]).run("talk")
    assert len(run.rounds) == 13
    assert run.round(13).sentences == undisturbed["last"]["sentences"]
    assert [row["client"] for row in run.round(1).clients] == ["north", "south"]
    assert len(run.clients) == 2
    assert not run.versions
    assert "exchange 13" in run._repr_html_()
    events = list(run.follow(after=0))
    numbers = [record["round_id"] for event in events for record in closed(event)]
    assert sorted(numbers) == [*range(1, 14)], "two of threads close in any order"
    assert events[-1].run["exchanges"] == 13
    assert "the run is finished: main() returned after 13 exchanges" in events[-1].lines
    ran("export", "jsonl", "talk", "--state", undisturbed["state"], "--to", tmp_path)
    (file,) = tmp_path.glob("*.jsonl")
    rows = [line for line in map(json.loads, file.read_text().splitlines()) if line["kind"] == "row"]
    assert [row["step"] for row in rows] == [*range(1, 14)]
    assert rows[-1]["values"]["exchange/errors/training_failed"] == 2
    assert rows[0]["values"]["exchange/kind/train"] == 1
    assert rows[0]["values"]["exchange/bytes_down"] > 16_000


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["run", "list"], "13 exchanges"),
        (["run", "show", "talk-1"], "13 exchanges; `atoll round list --run talk-1` has each"),
        (["run", "show", "talk-1", "--follow", "--after", "0"], "exchange 13: 2 messages (query.fail) closed"),
        (["run", "show", "talk-1", "--sites"], "has no metrics of single sites"),
        (["round", "list"], "query.fail"),
        (["round", "show", "12"], "Exchange 12 sent 1 message (query.stats) to 1 node"),
        (["round", "show", "12", "--follow"], "Exchange 12 sent 1 message (query.stats) to 1 node"),
        (["model", "list"], "has no version yet"),
    ],
)
def test_every_command_that_shows_a_run_shows_one_of_messages(command, says, undisturbed):
    assert says in ran(*command, "--state", undisturbed["state"]).output


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
    assert digests(exchanges(tmp_path))[:10] == digests(undisturbed["documents"])[:10]


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
        started(it, environment={"WAITS_AT": "step 2"})
        it.agent("north")
        it.agent("south")
        it.wait_for((it.state / "runs" / "talk-1" / "program" / "waits").exists)  # the program is not over
        for number, name in ((3, "coordinator"), (6, "south"), (9, "coordinator")):
            it.wait_for(lambda number=number: f"exchange {number}: " in it.log("coordinator"))
            it.kill(name)
            started(it) if name == "coordinator" else it.agent(name)
        assert it.wait_for_end() == 0, it.log("coordinator")
        assert result(it) == {key: undisturbed[key] for key in ("seen", "answers", "errors")}
        assert "the server program starts again" in it.log("coordinator")


ENTRIES = ("RunStarted", "ProgramStarted", "ClientJoined:2", "NodesAsked:4", "ExchangeAsked:3", "UploadBegun:5",
           "UpdateReceived:8", "RepliesPulled", "ClientFailed:2", "ProgramEnded")  # fmt: skip
EFFECTS = ("StartProgram", "Deliver:9", "Accept:7", "RecordExchange:10", "AnswerNodes:2", "AnswerMessages:11", "EndRun")


@pytest.mark.parametrize(
    "crash_at",
    [
        "exchange.entry/ExchangeAsked:7",
        *(pytest.param(f"exchange.entry/{kind}", marks=pytest.mark.long) for kind in ENTRIES),
        *(pytest.param(f"exchange.effect/{kind}", marks=pytest.mark.long) for kind in EFFECTS),
    ],
)
def test_a_coordinator_that_dies_at_a_kind_of_entry_goes_on_with_the_same_digests(crash_at, tmp_path, undisturbed):
    with federation(tmp_path, task=TASK) as it:
        started(it, environment={VARIABLE: crash_at})
        it.agent("north")
        it.agent("south")
        assert it.running["coordinator"].wait(BOUND_S) == -signal.SIGKILL
        started(it)
        assert it.wait_for_end() == 0, it.log("coordinator")
        assert result(it) == {key: undisturbed[key] for key in ("seen", "answers", "errors")}


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
        assert (
            "the run is failed: exchange 2: message 1 of 1 differs from before: now train to north with content" in log
        )
        assert "the server program is not deterministic" in log


def test_what_the_program_raises_is_the_cause_of_the_end(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        started(it, main="raises")
        assert it.wait_for_end() != 0
        assert "the run is failed: RuntimeError: no strategy today (message_program.py, line" in it.log("coordinator")
