"""What an auditor on another machine sees of a coordinator, by the command line alone: what is seen here, too."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.protocol.audit_files import audit_folder
from tests.cli.federation import Federation, federation, start_run, wait_for
from tests.cli.invoking import invoke, refused, said, shown


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
def nowhere(it: Federation, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """Without the variable, whoever runs these tests might be a member of something."""
    monkeypatch.setenv("ATOLL_IDENTITY", str(it.folder / "hugo"))
    return "--state", it.folder / "nowhere"


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
def test_an_auditor_elsewhere_sees_what_is_seen_here(
    it: Federation, nowhere: tuple[str, Path], view: tuple[str, ...]
) -> None:
    assert said(*view, *nowhere) == said(*view, "--state", it.state)
    assert shown(*view, *nowhere) == shown(*view, "--state", it.state)
    assert not nowhere[1].exists()


def test_what_there_is_not_is_named_as_it_is_here(it: Federation, nowhere: tuple[str, Path]) -> None:
    for view in (("run", "show", "gone"), ("round", "show", "77", "--run", "done"), ("model", "list", "--run", "gone")):
        assert refused(*view, *nowhere) == refused(*view, "--state", it.state)
    assert refused("run", "show", "gone", *nowhere) == ["there is no run 'gone' (known: done-1, open-1)"]


def test_an_auditor_changes_nothing_and_takes_no_model(nowhere: tuple[str, Path], tmp_path: Path) -> None:
    assert refused("run", "stop", "open-1", *nowhere) == [
        "auditor hugo may not call atoll.v1.Admin/StopRun: it takes the role owner or operator"
    ]
    out = tmp_path / "model.safetensors"
    assert (
        "auditor hugo may not call atoll.v1.Coordinator/Download"
        in refused("model", "export", "--run", "done", "--out", out, *nowhere)[0]
    )
    assert list(tmp_path.iterdir()) == []


def test_an_operator_elsewhere_takes_the_model_that_is_here(
    it: Federation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = invoke("client", "invite", "olga", "--role", "operator", "--state", it.state).stdout.strip()
    monkeypatch.setenv("ATOLL_IDENTITY", str(tmp_path / "olga"))
    shown("join", code)
    nowhere, here = ("--run", "done", "--state", tmp_path / "nowhere"), ("--run", "done", "--state", it.state)
    for version in ([], ["1"]):
        ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
        local = shown("model", "export", *version, "--out", ours, *here)
        assert shown("model", "export", *version, "--out", theirs, *nowhere) == local | {"out": str(theirs)}
        assert theirs.read_bytes() == ours.read_bytes()
    assert refused("model", "export", "7", "--out", tmp_path / "m", *nowhere) == refused(
        "model", "export", "7", "--out", tmp_path / "m", *here
    )
    wait_for(lambda: "olga" in {e["actor"] for e in exports(it)})
    assert {e["object"] for e in exports(it) if e["actor"] == "olga"} == {"done-1 version 2", "done-1 version 1"}


def exports(it: Federation) -> list[dict[str, str]]:
    events: list[dict[str, str]] = shown("audit", "show", "--action", "model.export", "--state", it.state)["events"]
    return events


def test_the_audit_log_is_verified_from_elsewhere_and_says_who_read_it(
    it: Federation, nowhere: tuple[str, Path], tmp_path: Path
) -> None:
    assert "sound: nothing is changed" in said("audit", "verify", *nowhere)
    events = shown("audit", "show", "--actor", "hugo", *nowhere)["events"]
    assert {event["role"] for event in events} == {"auditor"}
    objects = [event["object"] for event in events]
    assert "/atoll.v1.Admin/ReadAuditLog" in objects
    shown("round", "list", "--run", "done", *nowhere)
    wait_for(lambda: shown("audit", "show", *nowhere)["events"][-2]["object"] == "/atoll.v1.Admin/Look done")
    out = tmp_path / "out.jsonl"
    invoke("audit", "export", "--out", out, *nowhere)
    [log] = audit_folder(it.state).glob("audit-*.jsonl")
    assert log.read_bytes().startswith(out.read_bytes())
    assert len(out.read_bytes().splitlines()) > len(objects)


def test_a_log_that_was_changed_is_found_from_elsewhere(it: Federation, nowhere: tuple[str, Path]) -> None:
    [log] = audit_folder(it.state).glob("audit-*.jsonl")
    with log.open("r+b") as file:  # in place: the coordinator goes on appending
        at = file.read().index(b"coordinator.start")
        file.seek(at)
        file.write(b"coordinator.stare")
    result = invoke("audit", "verify", *nowhere)
    with log.open("r+b") as file:
        file.seek(at)
        file.write(b"coordinator.start")
    assert result.exit_code == 1
    assert "FAULTY" in result.stdout
    assert "sound: " in said("audit", "verify", *nowhere)
