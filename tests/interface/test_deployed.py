"""`atoll.connect`: a deployed run watched, changed and read from Python, by its state directory and by its address with
a credential, also inside of a loop and after a kill.
"""

import asyncio
import json
import subprocess

import numpy as np
import pytest

import atoll
from atoll.interface.deployed import DeployedRun, Federation
from atoll.protocol.identity.enrolling import Place
from atoll.tensors import safetensors_file
from tests.federation.processes import ATOLL, federation
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK
from tests.waiting import BOUND_S

RUN = {"name": "python", "rounds": 3, "round__cohort_size": 4, "round__min_available": 4, "seed": 4}
CLIENTS = {"evaluation__clients_every": 1, "model__best": "accuracy", "model__source": "clients"}


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    """A federation whose run of three rounds has finished, with olga, an operator."""
    with federation(tmp_path_factory.mktemp("federation"), task=TASK) as it:
        it.coordinator(**RUN, **CLIENTS, stay=True)
        for site in line_task.SITES:
            it.agent(site, threads=1, exit_when_done=False)
        it.wait_for(lambda: "committed as version 3\n" in it.log("coordinator"))
        it.wait_for(lambda: str(it.history().run("python-1").state) == "finished")
        code = atoll.connect(it.state).invite("olga", role="operator")
        subprocess.check_output([ATOLL, "join", code, "--identity", it.folder / "olga"])
        yield it


def connected(it, by):
    if by == "state":
        return atoll.connect(it.state)
    place = Place.load(it.folder / "olga")
    return atoll.connect(place.admin_address if by == "address" else place.address, credential=it.folder / "olga")


@pytest.mark.slow
@pytest.mark.parametrize("by", ["state", pytest.param("address", marks=pytest.mark.long)])
def test_a_run_is_watched_continued_and_read_as_by_the_command_line(it, by, capfd):
    async def cell():
        watched(connected(it, by), it)

    asyncio.run(cell())  # as in a notebook
    assert capfd.readouterr() == ("", ""), "nothing is printed"


def watched(found, it):
    run = found.run("python")
    before = run.version
    assert (run.run_id, run.state) == ("python-1", "finished")
    assert run.rounds.column("version") == [*range(1, before + 1)]
    of_round = [ATOLL, "round", "show", "2", "--run", "python", "--state", it.state, "--json"]
    assert run.round(2).sentences == json.loads(subprocess.check_output(of_round))["sentences"]
    assert set(run.round().clients.column("client")) == set(line_task.SITES)
    sites = run.sites.frame()
    assert {*zip(sites["site"], sites["version"], strict=True)} == {
        (site, version) for site in line_task.SITES for version in range(1, before + 1)
    }
    best = next(row["version"] for row in run.versions if row["best"])
    out = it.folder / "best.safetensors"
    subprocess.check_output([ATOLL, "model", "export", "--best", "--run", "python", "--out", out, "--state", it.state])
    assert all(np.array_equal(run.model("best")[name], array) for name, array in safetensors_file.read(out).items())
    assert run.versions[best]["metrics.clients.accuracy"] is not None
    [axes] = run.plot("clients/accuracy").axes
    assert list(axes.lines[0].get_ydata()) == run.versions.column("metrics.clients.accuracy")[1:]
    beside = atoll.compare(run, run, metric="clients/accuracy")
    assert beside.rows.column("run") == [f"{run.run_id} 1", f"{run.run_id} 2"]
    assert beside.rows.column("final")[0] == run.versions.column("metrics.clients.accuracy")[-1]
    rate = 0.5 / (before + 1)
    [here] = run.follow()
    run.resume(rounds=before + 2, set={"local.lr": rate})
    events = list(run.follow(after=here.seq))
    assert [record["version"] for event in events if event.kind == "event" for record in event.records][-2:] == [
        before + 1,
        before + 2,
    ]
    assert events[-1].run["state"] == run.state == "finished"
    assert run.document["changes"][-1]["values"]["local.lr"]["after"] == rate
    with pytest.raises(
        atoll.AtollError, match=f"--set: rounds: got 2; {before + 2} versions are committed already"
    ) as refused:
        run.resume(rounds=2)
    assert refused.value.code == 2
    with pytest.raises(atoll.AtollError, match=r"there is no run 'nothing' \(known: python-1"):
        found.run("nothing")
    assert len(found.invite("east")) > 40
    asked = found.statistics(TASK)
    assert asked["answered"] == sorted(line_task.SITES)
    assert found.statistics() == found.statistics(number=asked["number"]) == asked
    with pytest.raises(atoll.AtollError, match="deadline: got 0; allowed"):
        found.statistics(TASK, deadline=0)
    another_run(found, it)


def another_run(found, it):
    second = found.start(TASK, set={"name": "second", "rounds": 1000, "round.min_available": 4})
    second.pause("to look at it")
    it.wait_for(lambda: second.state == "paused")
    second.stop("seen enough")
    assert (second.state, second.cause) == ("stopped", "seen enough")
    assert json.loads(json.dumps(found.runs[-1]["run"])) == second.run_id


def lines_of(events):
    return [line for event in events if event.kind == "event" for line in event.lines]


@pytest.mark.slow
def test_the_events_are_the_lines_of_the_log_and_go_on_after_an_entry(it):
    run = connected(it, "state").run("python")
    [before] = run.follow()
    wanted = run.version + 2
    run.resume(rounds=wanted)
    events = list(run.follow(after=before.seq))
    there = list(connected(it, "address").run("python").follow(after=before.seq))
    assert documents(there) == documents(events)
    lines = lines_of(events)
    assert any(f"committed as version {wanted}" in line for line in lines)
    middle = events[len(events) // 2].seq
    rest = list(connected(it, "data").run("python").follow(after=middle))
    assert lines_of(rest) == lines_of(event for event in events if event.kind == "event" and event.seq > middle)
    assert all(str(event).splitlines() == [*event.lines] for event in events if event.lines)
    assert {event.name for event in events} >= {"UpdateReceived", "Aggregated"}
    assert events[-1].run["state"] == "finished"
    html = next(event._repr_html_() for event in events if event.lines)
    assert html.startswith("<p>")


def documents(events):
    return [event.document for event in events if event.kind == "event"]


@pytest.mark.slow
def test_a_loop_goes_on_beside_the_events_and_a_dead_coordinator_is_waited_for(it):
    open_run = connected(it, "state").start(TASK, set={"name": "open", "rounds": 9, "round.min_available": 99})

    async def first_wait(run, kind):
        async for event in run.afollow():
            if event.kind == kind:
                return event

    async def cell():
        runs = [connected(it, by).run(open_run.run_id) for by in ("state", "address")]
        begun = await asyncio.gather(*(first_wait(run, "began") for run in runs))
        assert {event.run["run"] for event in begun} == {open_run.run_id}
        waits = [asyncio.create_task(first_wait(run, "waiting")) for run in runs]
        it.kill("coordinator")
        here, there = await asyncio.gather(*waits)
        assert here.lines == ("no coordinator runs this run: start it, and the run continues",)
        assert there.lines[0].endswith("trying again")
        endless = asyncio.create_task(first_wait(runs[0], "never"))
        await asyncio.sleep(0.3)
        endless.cancel()
        await asyncio.wait([endless], timeout=BOUND_S)
        assert endless.cancelled()

    asyncio.run(cell())
    for event in open_run.follow():
        if event.kind == "waiting":
            break
    run = atoll.connect(it.state).run("python")
    assert run.state == "finished"
    assert [*run.follow(after=0)][-1].run["state"] == "finished"
    with pytest.raises(atoll.AtollError, match="no coordinator holds"):
        run.resume(rounds=99)
    with pytest.raises(atoll.AtollError, match="does not answer") as refused:
        connected(it, "address").run()
    assert refused.value.code == 2


def test_where_there_is_no_coordinator_it_says_what_to_name(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_IDENTITY", str(tmp_path / "identity"))
    with pytest.raises(atoll.AtollError, match=r"no state directory .*nowhere, and `atoll join` left no credential"):
        atoll.connect(tmp_path / "nowhere")
    for arguments in (("127.0.0.1:7",), ("127.0.0.1:7", tmp_path / "identity"), ("atoll-state", tmp_path / "identity")):
        where, *credential = arguments
        with pytest.raises(atoll.AtollError, match=r"identity"):
            atoll.connect(where, credential=credential[0] if credential else None)
    with pytest.raises(atoll.AtollError, match=r"credential: got 'me', and .* is on this machine: leave it out"):
        atoll.connect(tmp_path, credential="me")


ODD = {
    "run": (lambda found, run: found.run(3), "name: got 3; allowed: a string"),
    "round": (lambda found, run: run.round("x"), "round: got 'x'; allowed: a whole number"),
    "after": (lambda found, run: list(run.follow(after=-1)), "after: got -1; allowed: a whole number, at least 0"),
    "far": (lambda found, run: list(run.follow(after=2**70)), "after: got 1180591620717411303424; allowed: .* at most"),
    "no number": (lambda found, run: list(run.follow(after="x")), "after: got 'x'; allowed"),
    "reason": (lambda found, run: run.stop(3), "reason: got 3; allowed: a string"),
    "half a pair": (lambda found, run: run.pause("\ud800"), r"reason: got '\\ud800'; allowed: a string"),
    "rounds": (lambda found, run: run.resume(rounds="x"), "rounds: got 'x'; allowed: a whole number, at least 1"),
    "set": (lambda found, run: run.resume(set=[]), r"set: got \[\]; allowed: a dictionary"),
    "name": (lambda found, run: found.invite(3), "name: got 3; allowed: a string"),
    "hours": (lambda found, run: found.invite("a", hours=float("nan")), "hours: got nan; allowed: a number, at least"),
    "deadline": (lambda found, run: found.statistics(TASK, deadline="x"), "deadline: got 'x'; allowed: a number"),
    "number": (lambda found, run: found.statistics(number=-1), "number: got -1; allowed: a whole number, at least 0"),
}


def test_an_odd_argument_is_refused_before_anything_is_asked(tmp_path):
    """Following after entry -1 had no end."""
    found = Federation(tmp_path)
    for call, message in ODD.values():
        with pytest.raises(atoll.AtollError, match=message):
            call(found, DeployedRun(found, "python-1"))
