"""The output of the commands, while a coordinator runs and after its death."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from atoll.cli.printing import metrics_text
from atoll.protocol.json_values import plain
from atoll.protocol.vocabulary import RunId, Version
from atoll.server.journal.holder import running_coordinator
from atoll.server.journal.rows import EvaluationRow
from atoll.server.views.views import measures, unmeasured
from tests.cli.federation import Federation, federation, start_run, wait_for
from tests.cli.invoking import invoke, refused, said, shown


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Two rounds of `done` are committed; `open` waits for clients that will never come; `queued` waits behind it."""
    with federation(tmp_path_factory.mktemp("federation"), "max_runs=1") as it:
        assert start_run(it, "done", "rounds=2")["run"] == "done-1"
        wait_for(lambda: it.run_state("done") == "finished")
        assert start_run(it, "open", "round.cohort_size=9")["state"] == "running"
        assert start_run(it, "queued") == {"run": "queued-1", "state": "queued", "message": ""}
        wait_for(lambda: shown("round", "list", "--run", "open", "--state", it.state))
        yield it


def test_runs_are_listed_in_their_order(it: Federation) -> None:
    runs = shown("run", "list", "--state", it.state)
    assert [(run["run"], run["state"], run["version"]) for run in runs] == [
        ("done-1", "finished", 2),
        ("open-1", "waiting", 0),
        ("queued-1", "queued", 0),
    ]
    assert runs[0].keys() == {
        *(
            "run",
            "name",
            "task",
            "state",
            "cause",
            "version",
            "rounds",
            "created_at",
            "ended_at",
            "exchanges",
            "clocks",
            "notices",
            "wait",
        ),
    }
    header, first, *_ = said("run", "list", "--state", it.state).splitlines()
    assert header.split() == ["run", "task", "state", "version", "of", "created", "cause"]
    assert first.endswith("2 rounds are committed")


def test_a_run_is_shown_with_its_metrics_and_settings(it: Federation) -> None:
    run = shown("run", "show", "done", "--state", it.state)
    assert (run["run"], run["cause"]) == ("done-1", "2 rounds are committed")
    assert run["settings"]["rounds"] == 2
    assert run["settings"]["round"]["cohort_size"] == 2
    assert run["metrics"].keys() == {"1", "2"}
    assert run["metrics"]["2"]["server"].keys() == {"mean"}  # two sums: total / count
    assert isinstance(run["metrics"]["2"]["server"]["mean"], float)
    text = said("run", "show", "done-1", "--state", it.state)
    assert text.startswith("done-1 is finished: 2 rounds are committed\n")
    assert "\nversion 2: mean " in text
    assert "\n[round]\ncohort_size = 2\n" in text


def test_rounds_are_listed_with_their_reasons(it: Federation) -> None:
    rounds = shown("round", "list", "--run", "done", "--state", it.state)
    assert [(r["round"], r["phase"], r["reason"], r["reported"]) for r in rounds] == [
        (1, "committed", "enough", 2),
        (2, "committed", "enough", 2),
    ]
    assert len(said("round", "list", "--run", "done", "--state", it.state).splitlines()) == 3


def test_a_round_is_explained_in_sentences(it: Federation) -> None:
    lines = said("round", "show", "2", "--run", "done", "--state", it.state).splitlines()
    assert lines[0].startswith("Round 2 started from version 1 and was committed as version 2")
    record = shown("round", "show", "2", "--run", "done", "--state", it.state)
    sentences, rest = lines[: len(record["sentences"])], lines[len(record["sentences"]) :]
    assert record["sentences"] == sentences
    assert rest[1] == "training:"
    assert {line.split()[0] for line in rest[3:5]} == record["training"]["sites"].keys() == {"a", "b"}
    assert record["clients"].keys() == {"a", "b"}
    assert said("round", "show", "--run", "done", "--state", it.state).splitlines() == lines


def test_the_open_round_of_a_run_is_explained_too(it: Federation) -> None:
    text = said("round", "show", "1", "--run", "open", "--state", it.state)
    assert "waiting for clients: 9 must be connected" in text
    assert refused("round", "show", "7", "--run", "open", "--state", it.state) == [
        "run open-1 has no record of a round 7 (known: 1)"
    ]
    assert refused("round", "show", "--state", it.state) == ["run queued-1 has had no round yet"]


def test_clients_are_listed_with_what_they_did(it: Federation) -> None:
    clients = shown("client", "list", "--run", "done", "--state", it.state)
    assert [(c["client"], c["num_examples"], c["invited"], c["used"]) for c in clients] == [
        ("a", 10, 2, 2),
        ("b", 20, 2, 2),
    ]
    wait_for(lambda: all(c["connected"] for c in shown("client", "list", "--run", "open", "--state", it.state)))
    assert said("client", "list", "--run", "open", "--state", it.state).splitlines()[1].split()[:2] == ["a", "yes"]


def test_versions_are_listed_with_what_they_are_worth(it: Federation) -> None:
    versions = [v for v in shown("model", "list", "--run", "done", "--state", it.state) if v["version"]]
    assert [(v["version"], v["kept"]) for v in versions] == [(1, True), (2, True)]
    assert versions[1]["metrics"]["server"]["mean"] == pytest.approx(0.5)  # w: 0, 1/3, 1/2 (a pulls to 0, b to 1)
    assert said("model", "list", "--run", "done", "--state", it.state).splitlines()[0].split()[:2] == [
        "version",
        "metrics",
    ]


def test_a_version_is_exported_and_checked_on_the_way(it: Federation, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    exported = shown("model", "export", "--out", out, "--run", "done", "--state", it.state)
    source = it.state / "runs" / "done-1" / "versions" / "000002.safetensors"
    assert exported["version"] == 2
    assert exported["digest"] == shown("model", "list", "--run", "done", "--state", it.state)[-1]["digest"]
    assert out.read_bytes() == source.read_bytes()
    assert load_file(out).keys() == {"w", "count"}
    shown("model", "export", "0", "--out", out, "--run", "done", "--state", it.state)
    assert load_file(out)["count"] == 0
    (fault,) = refused("model", "export", "9", "--out", out, "--run", "done", "--state", it.state)
    assert fault.startswith("version 9 is not kept, or not made yet (kept: 0, 1, 2;")


def test_a_place_where_no_file_can_be_is_named_before_anything_is_copied(it: Federation, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    os.mkfifo(tmp_path / "pipe")
    for out, fault in {
        tmp_path: f"is a directory: name a file in it, such as {tmp_path / 'model.safetensors'}",
        tmp_path / "no" / "x": f"cannot be created: there is no directory {tmp_path / 'no'}",
        tmp_path / "file" / "x": f"cannot be created: there is no directory {tmp_path / 'file'}",
        tmp_path / "pipe": "is not a regular file, and only a regular file is replaced: name another",
    }.items():
        assert refused("model", "export", "--out", out, "--run", "done", "--state", it.state) == [f"{out} {fault}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


def test_an_export_replaces_only_the_file_that_was_named(it: Federation, tmp_path: Path) -> None:
    for name in ("m.part", "m.gathered"):
        (tmp_path / name).write_text("precious")
    (tmp_path / "m").touch()  # as of `mktemp`
    shown("model", "export", "0", "--out", tmp_path / "m", "--run", "done", "--state", it.state)
    shown("model", "export", "--out", tmp_path / "m", "--run", "done", "--state", it.state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.gathered", "m.part"]
    assert [path.read_text() for path in tmp_path.glob("m.*")] == ["precious"] * 2


def test_an_export_does_not_replace_what_is_no_model(it: Federation, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("rounds = 3")
    out = tmp_path / "run.toml"
    assert refused("model", "export", "--out", out, "--run", "done", "--state", it.state) == [
        f"{out} is not a safetensors file, and only such a file is replaced: name another"
    ]
    assert out.read_text() == "rounds = 3"


def test_a_refused_export_of_an_adapter_leaves_no_folder(it: Federation, tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    for was_there in (False, True):
        (fault,) = refused("model", "export", "--peft", out, "--run", "done", "--state", it.state)
        assert "the model has no PEFT adapter" in fault
        assert out.exists() == was_there
        out.mkdir(exist_ok=True)


def test_a_damaged_version_is_not_exported(it: Federation, tmp_path: Path) -> None:
    source = it.state / "runs" / "done-1" / "versions" / "000001.safetensors"
    good = source.read_bytes()
    source.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        (fault,) = refused("model", "export", "1", "--out", tmp_path / "m", "--run", "done", "--state", it.state)
    finally:
        source.write_bytes(good)
    assert fault.endswith("is damaged: the SHA-256 of tensor w differs from its manifest")
    assert list(tmp_path.iterdir()) == []


def test_the_coordinator_s_refusals_come_in_its_own_words(it: Federation) -> None:
    assert refused("run", "resume", "done-1", "--state", it.state) == [
        "run done-1 is finished: 2 rounds are committed; `atoll run resume done-1 --rounds 3` (or more) gives it "
        "further rounds"
    ]
    (fault,) = refused("run", "stop", "nope", "--state", it.state)
    assert fault.startswith("there is no run 'nope'")


def test_the_log_of_a_process_is_one_line_for_each_thing(it: Federation) -> None:
    lines = it.log("coordinator").splitlines()
    assert re.search(r" atoll [\d.]+: the coordinator starts, state in ", lines[0])
    ready, invite = (line for line in lines if "atoll coordinator on " in line or "invite a site: " in line)
    assert re.search(r" atoll coordinator on 127\.0\.0\.1:\d+, state in .*; atoll [\d.]+ build [0-9a-f]{10}$", ready)
    assert invite.endswith(f"invite a site: atoll client invite NAME --state {it.state}")
    assert any(line.endswith("done-1: round 2: committed as version 2") for line in lines)
    assert all(line[13] == line[16] == ":" for line in lines), lines
    assert "the agent of a starts, for four_numbers_task:task, state in " in it.log("a").splitlines()[0]


def test_a_run_is_stopped_and_resumed_and_all_is_shown_after_a_kill(it: Federation) -> None:
    why = "enough of it, " * 60 + "truly"
    stopped = shown("run", "stop", "open-1", "--reason", why, "--state", it.state)
    assert stopped["state"] == "stopped"
    run = shown("run", "show", "open", "--state", it.state)
    assert (run["state"], run["cause"]) == ("stopped", why)
    assert shown("run", "list", "--state", it.state)[1]["cause"] == why
    listed = said("run", "list", "--state", it.state).splitlines()[2]
    assert listed.endswith("  " + ("enough of it, " * 6)[:79].rstrip() + "…")
    wait_for(lambda: it.run_state("queued") == "finished")
    assert said("run", "resume", "open-1", "--state", it.state) == "open-1 is running\n"
    assert shown("run", "pause", "open-1", "--reason", "lunch", "--state", it.state)["state"] == "paused"
    assert said("run", "show", "open", "--state", it.state).startswith("open-1 is paused: lunch\n")
    assert said("run", "resume", "open-1", "--state", it.state) == "open-1 is running\n"
    assert said("run", "delete", "queued-1", "--yes", "--state", it.state) == "queued-1 is deleted\n"
    assert [run["run"] for run in shown("run", "list", "--state", it.state)] == ["done-1", "open-1"]
    it.processes["coordinator"].kill()
    it.processes["coordinator"].wait()
    assert running_coordinator(it.state) is None
    assert it.run_state("open") == "waiting"
    audit = shown("audit", "verify", "--state", it.state)
    assert audit["faults"] == []
    done = [event["action"] for event in shown("audit", "show", "--last", 5000, "--state", it.state)["events"]]
    assert {"run.add", "run.stop", "run.resume", "round.commit", "client.join", "model.export"} <= set(done)
    assert not any(c["connected"] for c in shown("client", "list", "--run", "open", "--state", it.state))
    assert refused("run", "stop", "open-1", "--state", it.state)[0].startswith("no coordinator holds")


def test_nothing_is_written_by_looking(it: Federation) -> None:
    def files() -> dict[str, float]:
        paths = [path for path in it.state.rglob("*") if path.is_file() and not path.name.startswith("state.db-")]
        return {str(path): path.stat().st_mtime for path in paths}

    it.processes["coordinator"].kill()
    it.processes["coordinator"].wait()
    before = files()
    for command in ("run list", "round list", "client list", "model list", "audit show", "audit verify"):
        which = [] if command.startswith("audit") else ["--run", "done"]
        assert invoke(*command.split(), *which, "--state", it.state).exit_code in (0, 2)
    assert files() == before


def test_json_is_json_whatever_is_in_it() -> None:
    value = {"a": float("nan"), 1: (float("inf"), Path("x"))}
    why = {"a": "NaN", "1.0": "Infinity"}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {"a": None, "1": [None, "x"], "not_finite": why}


def test_metrics_come_from_the_task_or_are_total_over_count() -> None:
    def row(version: int, **sums: tuple[float, ...]) -> EvaluationRow:
        return EvaluationRow(RunId("r"), Version(version), "server", sums, 1, "", 0.0)

    rows = [
        row(1, accuracy=(3.0, 4.0), f1=(1.0, 2.0, 3.0), none=(0.0, 0.0)),
        replace(row(2, f1=(1.0, 2.0, 3.0)), values={"f1": 0.5}),
    ]
    found = measures(rows)
    assert found == {
        1: {"server": {"accuracy": 0.75, "f1": [1.0, 2.0, 3.0], "none": None}},
        2: {"server": {"f1": 0.5}},
    }
    assert metrics_text(found[1]) == "accuracy 0.75, f1 [1.0, 2.0, 3.0], none undefined"
    failed = replace(rows[0], statistics=None, detail="no data")
    assert measures([failed]) == {}
    assert unmeasured([failed, rows[1]]) == [{"version": 1, "source": "server", "reason": "no data"}]
