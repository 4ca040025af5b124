"""The view of an auditor on another machine, which equals the view at the coordinator."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.operations import admin
from atoll.operations.faults import CommandError
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.audit.files import audit_folder
from tests.cli.federation import Federation, federation, start_run, wait_for
from tests.cli.invoking import TINY, invoke, refused, said, shown


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A run of two rounds has ended, and another waits for clients that will never come; hugo is an auditor."""
    with federation(tmp_path_factory.mktemp("federation")) as it:
        code = invoke("client", "invite", "hugo", "--role", "auditor", "--state", it.state).stdout.strip()
        assert shown("join", code, "--identity", it.folder / "hugo")["role"] == "auditor"
        start_run(it, "done", "rounds=2")
        wait_for(lambda: it.run_state("done") == "finished")
        start_run(it, "open", "round.cohort_size=9")
        wait_for(lambda: shown("round", "list", "--run", "open", "--state", it.state))
        yield it


@pytest.fixture
def hugo(it: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The commands are hugo's, on a machine without a state directory."""
    monkeypatch.setenv("ATOLL_IDENTITY", str(it.folder / "hugo"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def become_operator(it: Federation, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The commands are this operator's, on a machine without a state directory."""
    code = invoke("client", "invite", name, "--role", "operator", "--state", it.state).stdout.strip()
    monkeypatch.setenv("ATOLL_IDENTITY", str(tmp_path / name))
    shown("join", code)
    monkeypatch.chdir(tmp_path)


VIEWS = [
    ("run", "list"),
    ("run", "show", "done"),
    ("run", "show", "open-1"),
    ("round", "list", "--run", "done"),
    ("round", "show", "--run", "done"),
    ("round", "show", "1", "--run", "done"),
    ("round", "show", "--run", "open"),
    ("client", "list", "--run", "done"),
    ("client", "list"),
    ("model", "list", "--run", "done"),
]


@pytest.mark.parametrize("view", VIEWS, ids=" ".join)
@pytest.mark.usefixtures("hugo")
def test_an_auditor_elsewhere_sees_what_is_seen_here(it: Federation, view: tuple[str, ...]) -> None:
    assert said(*view) == said(*view, "--state", it.state)
    assert shown(*view) == shown(*view, "--state", it.state)
    assert not any(Path().iterdir())


@pytest.mark.usefixtures("hugo")
def test_an_auditor_elsewhere_exports_what_is_exported_here(it: Federation) -> None:
    (found,) = shown("export", "jsonl", "done", "--follow", "--to", "there")
    assert (found["run"], found["state"]) == ("done-1", "finished")
    said("export", "jsonl", "done-1", "--to", "here", "--state", it.state)
    assert Path("there", "done-1.jsonl").read_text() == Path("here", "done-1.jsonl").read_text()


@pytest.mark.parametrize(
    "view",
    [
        ("run", "show", "done", "--follow"),
        ("run", "show", "done", "--follow", "--after", "0"),
        ("run", "show", "done", "--follow", "--after", "7", "--json"),
        ("round", "show", "2", "--run", "done", "--follow"),
        ("round", "show", "1", "--run", "done", "--follow", "--json"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("hugo")
def test_an_auditor_elsewhere_follows_what_is_followed_here(it: Federation, view: tuple[str, ...]) -> None:
    assert said(*view) == said(*view, "--state", it.state)
    assert not any(Path().iterdir())


@pytest.mark.usefixtures("hugo")
def test_a_command_with_a_missing_directory_notes_the_coordinator_it_asks() -> None:
    result = invoke("audit", "verify", "--state", "backup")
    assert "there is no backup here: asking the coordinator at 127.0.0.1:" in result.stderr
    assert result.exit_code == 0


@pytest.mark.usefixtures("hugo")
def test_what_there_is_not_is_named_as_it_is_here(it: Federation) -> None:
    runs, rounds, versions = ("run", "show"), ("round", "show", "77", "--run", "done"), ("model", "list", "--run")
    follow = (*runs, "gone", "--follow")
    for view in ((*runs, "gone"), (*runs, ""), rounds, (*versions, "gone"), follow):
        assert refused(*view) == refused(*view, "--state", it.state)
    assert refused("run", "show", "gone") == ["there is no run 'gone': did you mean done-1? (known: done-1, open-1)"]


@pytest.mark.usefixtures("hugo")
def test_what_cannot_be_asked_for_is_refused() -> None:
    assert refused("run", "show", "\udcff")[0].startswith("run '\\udcff', round 0: ")
    assert "got 99999999999999999999999; allowed:" in invoke("round", "show", "9" * 23).stderr


@pytest.mark.usefixtures("hugo")
def test_an_auditor_changes_nothing_and_takes_no_model() -> None:
    assert refused("run", "stop", "open-1") == [
        "auditor hugo may not call atoll.v1.Admin/StopRun: it takes the role owner or operator"
    ]
    out = Path("model.safetensors")
    (fault,) = refused("model", "export", "--run", "done", "--out", out)
    assert " cannot be fetched: PERMISSION_DENIED: auditor hugo may not call atoll.v1.Coordinator/Download" in fault
    assert not any(Path().iterdir())


def test_an_operator_elsewhere_takes_the_model_that_is_here(
    it: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    become_operator(it, "olga", monkeypatch, tmp_path)
    there, here = ("--run", "done"), ("--run", "done", "--state", it.state)
    for version in ([], ["1"]):
        ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
        local = shown("model", "export", *version, "--out", ours, *here)
        assert shown("model", "export", *version, "--out", theirs, *there) == local | {"out": str(theirs)}
        assert theirs.read_bytes() == ours.read_bytes()
    assert refused("model", "export", "--out", tmp_path, *there)[0].startswith(
        f"{tmp_path} is a directory: name a file"
    )
    assert refused("model", "export", "7", "--out", tmp_path / "m", *there) == refused(
        "model", "export", "7", "--out", tmp_path / "m", *here
    )
    wait_for(lambda: "olga" in {e["actor"] for e in exports(it)})
    assert {e["object"] for e in exports(it) if e["actor"] == "olga"} == {"done-1 version 2", "done-1 version 1"}


def test_an_operator_elsewhere_starts_a_run_of_a_task_at_the_coordinator(
    it: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    become_operator(it, "otto", monkeypatch, tmp_path)
    there = tmp_path / "there" / "task.py"  # for the command a file of another machine: it does not look for it
    assert refused("run", "start", f"{there}:task") == [f"{there}:task: there is no file {there}"]
    told = "is a relative path, and the coordinator is on another machine: name the absolute path of the file there"
    Path("run.toml").write_text('name = "far"\ntask = "task.py:task"\nrounds = 1\n')
    for what, where in (("task.py:task", ""), ("run.toml", "run.toml: ")):
        assert refused("run", "start", what) == [f"{where}task: task.py {told}"]
    assert refused("run", "start", "run.toml", "--set", "cohort.sampler=draw.py:draw")[1:] == [
        f"--set: cohort.sampler: draw.py {told}"
    ]
    assert shown("run", "start", "run.toml", "--set", f"task={TINY}:task")["run"] == "far-1"
    wait_for(lambda: it.run_state("far") == "finished")
    shown("run", "delete", "far-1", "--yes", "--state", it.state)


def test_a_file_s_coordinator_table_is_not_sent_when_its_run_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The table is for the coordinator that this file may start, with its paths and its database."""
    asked = list[str]()
    monkeypatch.setattr(admin, "start", lambda state, toml: asked.append(toml) or pb.RunReply(run_id="a-1"))
    file = tmp_path / "run.toml"
    file.write_text(f'task = "{TINY}:task"\n[coordinator]\nlisten = "127.0.0.1:7171"\n')
    invoke("run", "start", file, "--state", tmp_path)
    assert "task" in asked[0]
    assert "coordinator" not in asked[0]


@pytest.mark.long
def test_an_operator_elsewhere_takes_a_model_that_lies_at_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with federation(tmp_path, "aggregators=2") as it:
        code = invoke("client", "invite", "olga", "--role", "operator", "--state", it.state).stdout.strip()
        monkeypatch.setenv("ATOLL_IDENTITY", str(tmp_path / "olga"))
        shown("join", code)
        start_run(it, "done", "rounds=1")
        wait_for(lambda: it.run_state("done") == "finished")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        local = shown("model", "export", "--out", "ours", "--state", it.state)
        assert shown("model", "export", "--out", "theirs") == local | {"out": "theirs"}
        assert Path("theirs").read_bytes() == Path("ours").read_bytes()


def exports(it: Federation) -> list[dict[str, str]]:
    events: list[dict[str, str]] = shown("audit", "show", "--action", "model.export", "--state", it.state)["events"]
    return events


@pytest.mark.usefixtures("hugo")
def test_the_audit_log_is_verified_from_elsewhere_and_records_its_reader(it: Federation) -> None:
    assert "sound: nothing is changed" in said("audit", "verify")
    events = shown("audit", "show", "--actor", "hugo")["events"]
    assert {event["role"] for event in events} == {"auditor"}
    objects = [event["object"] for event in events]
    assert "/atoll.v1.Admin/ReadAuditLog" in objects
    shown("round", "list", "--run", "done")
    wait_for(lambda: shown("audit", "show")["events"][-2]["object"] == "/atoll.v1.Admin/Look done")
    out = Path("out.jsonl")
    invoke("audit", "export", "--out", out)
    [log] = audit_folder(it.state).glob("audit-*.jsonl")
    assert log.read_bytes().startswith(out.read_bytes())
    assert len(out.read_bytes().splitlines()) > len(objects)


@pytest.mark.usefixtures("hugo")
def test_a_log_that_was_changed_is_found_from_elsewhere(it: Federation) -> None:
    [log] = audit_folder(it.state).glob("audit-*.jsonl")
    with log.open("r+b") as file:  # in place: the coordinator goes on appending
        at = file.read().index(b"coordinator.start")
        file.seek(at)
        file.write(b"coordinator.stare")
    result = invoke("audit", "verify")
    with log.open("r+b") as file:
        file.seek(at)
        file.write(b"coordinator.start")
    assert result.exit_code == 1
    assert "FAULTY" in result.stdout
    assert "sound: " in said("audit", "verify")


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([("../key.pem", b"x")], "sent '../key.pem', which is not the next file of an audit log"),
        (
            [("audit-000000000000.jsonl", b"x"), ("public.pem", b""), ("audit-000000000000.jsonl", b"y")],
            "not the next file",
        ),
        ([("audit-000000000000.jsonl", bytes(2**20))] * 40, "more than 33554432 bytes of audit-000000000000.jsonl"),
    ],
    ids=["outside", "twice", "too large"],
)
def test_a_coordinator_that_sends_anything_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[tuple[str, bytes]], fault: str
) -> None:
    class False_:
        def ReadAuditLog(self, request: object, timeout: float) -> list[pb.AuditLogPart]:
            return [pb.AuditLogPart(file=name, data=data) for name, data in parts]

    folder = tmp_path / "audit"
    folder.mkdir()
    monkeypatch.setattr(admin, "ask", lambda state, request: request(False_()))
    with pytest.raises(CommandError, match=fault):
        admin.fetch_audit_log(Path("state"), folder)
    assert list(tmp_path.iterdir()) == [folder]
