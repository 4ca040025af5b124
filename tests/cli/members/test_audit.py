"""`atoll audit`: on a state directory, and on files alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.protocol.audit.chain import Event, instant
from atoll.protocol.audit.files import AuditFiles, audit_folder, log_files
from tests.cli.invoking import invoke, refused, said, shown

NOON = 1_769_860_800.0  # 2026-01-31T12:00:00Z


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A log of ten stopped runs, one an hour; the last actor's name has a control sequence of terminals."""
    state, now = tmp_path / "state", [NOON]
    files = AuditFiles(audit_folder(state), lambda: now[0], file_bytes=1500)
    for number in range(10):
        now[0] = NOON + 3600 * number
        actor = "ada" if number < 9 else "eve\x1b[2J"
        files.append([Event(instant(now[0]), actor, "operator", "run.stop", f"run-{number}", "ok")], sign=True)
    files.close()
    return state


def verdict(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = invoke("audit", "verify", *arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_a_sound_log_is_reported_sound(state: Path) -> None:
    code, found = verdict("--state", state)
    assert (code, found["events"], found["checkpoints"], found["num_faults"]) == (0, 10, 10, 0)
    assert (found["first"], found["last"], found["unsigned"]) == (0, 19, 0)
    assert "sound: nothing is changed" in said("audit", "verify", "--state", state)


def test_a_changed_line_is_named_and_the_exit_code_is_1(state: Path) -> None:
    path = log_files(audit_folder(state))[1]
    text = path.read_text()
    path.write_text(text.replace("ada", "bob", 1))
    code, found = verdict("--state", state)
    assert (code, found["num_faults"]) == (1, 1)
    assert found["faults"][0].startswith(f"{path.name}:1: changed")
    result = invoke("audit", "verify", "--state", state)
    assert result.exit_code == 1
    assert "FAULTY: 1 fault" in result.stdout


def test_lines_are_archived_and_verified_with_and_without_the_archive(state: Path, tmp_path: Path) -> None:
    done = shown("audit", "archive", "--out", tmp_path / "old", "--state", state)
    assert (done["first"], done["last"], len(done["files"])) == (0, 19, 4)
    once_more(state)
    code, found = verdict("--state", state)
    assert (code, found["first"], found["events"]) == (0, 20, 2)
    text = said("audit", "verify", "--state", state)
    assert "lines 0 to 19 were archived at 20" in text
    assert f"the last with hash {found['relies_on']}" in text
    assert "sound from line 20 on" in text
    code, found = verdict("--archive", tmp_path / "old", "--state", state)
    assert (code, found["first"], found["events"], found["relies_on"]) == (0, 0, 12, None)
    assert "sound: nothing is changed" in said("audit", "verify", "--archive", tmp_path / "old", "--state", state)
    events = shown("audit", "show", "--archive", tmp_path / "old", "--last", 12, "--state", state)["events"]
    assert [event["action"] for event in events[-2:]] == ["audit.archive", "run.stop"]
    (tmp_path / "empty").mkdir()
    assert "is not an archive" in refused("audit", "verify", "--archive", tmp_path / "empty", "--state", state)[0]
    again = said("audit", "archive", "--out", tmp_path / "old", "--state", state)
    assert again.startswith("lines 20 to 2")
    assert "there is no log in" in refused("audit", "archive", "--out", tmp_path / "x", "--state", tmp_path / "none")[0]


def test_an_archive_of_a_faulty_log_names_the_faults_and_its_exit_code_is_1(state: Path, tmp_path: Path) -> None:
    path = log_files(audit_folder(state))[1]
    path.write_text(path.read_text().replace("ada", "bob", 1))
    result = invoke("audit", "archive", "--out", tmp_path / "old", "--state", state)
    assert (result.exit_code, result.stdout.startswith(f"{path.name}:1: changed")) == (1, True)
    assert f"1 fault: keep {tmp_path / 'old'} as evidence" in result.stderr
    assert ", with 1 fault: with --archive DIR they are verified" in said("audit", "verify", "--state", state)
    once_more(state)
    assert shown("audit", "archive", "--out", tmp_path / "old", "--state", state)["faults"] == []
    assert verdict("--archive", tmp_path / "old", "--state", state)[0] == 1


@pytest.mark.parametrize("has_archive", [False, True])
def test_an_emptied_log_is_no_log_with_nothing_to_archive(state: Path, tmp_path: Path, has_archive: bool) -> None:
    if has_archive:
        shown("audit", "archive", "--out", tmp_path / "old", "--state", state)
    [path, *more] = log_files(audit_folder(state))
    path.write_bytes(b"")
    for each in more:
        each.unlink()
    result = invoke("audit", "archive", "--out", tmp_path / "new", "--state", state)
    assert result.exit_code == 1
    assert result.stdout == "the log: it holds no line: it was emptied, or nothing of it was ever written\n"
    why = f"FAULTY: nothing is archived: the log in {audit_folder(state)} has 1 fault: keep it as evidence"
    assert why in result.stderr
    assert not (tmp_path / "new").exists()
    assert invoke("audit", "archive", "--out", tmp_path / "new", "--state", state, "--json").exit_code == 1


def test_a_file_is_no_place_for_an_archive(state: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said_of_it = refused("audit", "archive", "--out", tmp_path / "file", "--state", state)
    assert said_of_it == [f"nothing is archived: {tmp_path / 'file'} is not a folder: name another one with --out"]


def once_more(state: Path) -> None:
    """Append an event from a further process."""
    files = AuditFiles(audit_folder(state), lambda: NOON + 86400, file_bytes=1500)
    files.append([Event(instant(NOON + 86400), "ada", "operator", "run.stop", "run-x", "ok")], sign=True)
    files.close()


def test_a_line_torn_by_a_crash_is_reported_and_no_fault(state: Path) -> None:
    folder = audit_folder(state)
    with log_files(folder)[-1].open("ab") as file:
        file.write(b'{"action":"run.st')
    once_more(state)
    code, found = verdict("--state", state)
    assert (code, found["num_faults"], found["cut_files"]) == (0, 0, ["cut-000000000020.bin"])
    assert [(line["seq"], line["action"]) for line in found["mended"]] == [(20, "audit.repair")]
    assert said("audit", "verify", "--state", state).splitlines()[:2] == [
        "line 20 of 2026-02-01T12:00:00.000000Z: audit.repair: line 20: 17 bytes of unfinished lines cut off",
        "cut-000000000020.bin: the bytes that were cut off, beside the log",
    ]


def test_a_damaged_log_stays_faulty_when_the_next_process_has_written(state: Path) -> None:
    folder = audit_folder(state)
    damaged = log_files(folder)[-1]
    lines = damaged.read_bytes().splitlines(keepends=True)
    damaged.write_bytes(b"".join(lines[:-2] + lines[-1:]))
    faults = verdict("--state", state)[1]["faults"]
    assert faults
    once_more(state)
    code, found = verdict("--state", state)
    assert (code, found["faults"], found["cut_files"]) == (1, faults, [])
    assert [(line["action"], line["object"]) for line in found["mended"]] == [("audit.fault", damaged.name)]


def test_a_log_that_was_cut_off_fails_against_a_known_checkpoint(state: Path) -> None:
    known = shown("audit", "show", "--state", state)["checkpoint"]
    assert verdict("--state", state, "--checkpoint", known)[0] == 0
    log_files(audit_folder(state))[-1].unlink()
    assert verdict("--state", state)[0] == 0
    code, found = verdict("--state", state, "--checkpoint", known)
    assert code == 1
    assert "cut off, or rewritten" in found["faults"][0]


def test_a_log_without_a_line_is_faulty(state: Path) -> None:
    for path in log_files(audit_folder(state))[1:]:
        path.unlink()
    log_files(audit_folder(state))[0].write_bytes(b"")
    code, found = verdict("--state", state)
    assert (code, found["num_faults"], found["events"]) == (1, 1, 0)
    result = invoke("audit", "verify", "--state", state)
    assert (result.exit_code, result.stdout.splitlines()) == (
        1,
        [
            "the log: it holds no line: it was emptied, or nothing of it was ever written",
            "0 events and 0 checkpoints",
            "FAULTY: 1 fault",
        ],
    )


def test_what_begins_later_is_sound_from_there_on_only(state: Path, tmp_path: Path) -> None:
    rest, key = tmp_path / "rest.jsonl", audit_folder(state) / "public.pem"
    rest.write_text("".join(said("audit", "export", "--state", state).splitlines(keepends=True)[10:]))
    *_, before, last = said("audit", "verify", rest, "--key", key).splitlines()
    assert "a log begins at line 0, these files at line 10" in said("audit", "verify", rest)
    assert last == (
        "sound from line 10 on: nothing is changed, missing or out of order there; earlier lines were not checked"
    )
    assert before.startswith("last checkpoint")


def test_the_newest_events_are_shown(state: Path) -> None:
    found = shown("audit", "show", "--last", 2, "--state", state)["events"]
    assert [(event["seq"], event["object"], event["time"]) for event in found] == [
        (16, "run-8", "2026-01-31T20:00:00.000000Z"),
        (18, "run-9", "2026-01-31T21:00:00.000000Z"),
    ]
    assert [e["object"] for e in shown("audit", "show", "--actor", "ada", "--last", 1, "--state", state)["events"]] == [
        "run-8"
    ]
    assert len(shown("audit", "show", "--action", "run", "--state", state)["events"]) == 10
    assert shown("audit", "show", "--action", "run.resume", "--state", state)["events"] == []
    assert refused("audit", "show", "--action", "runs", "--state", state)[0].startswith(
        "--action 'runs' is not an action: did you mean run"
    )


def test_no_name_steers_the_terminal(state: Path) -> None:
    text = said("audit", "show", "--state", state)
    assert "\x1b" not in text
    assert "eve\\u001b[2J" in text


def test_a_period_is_exported_as_it_stands_and_can_be_verified_alone(state: Path, tmp_path: Path) -> None:
    out, key = tmp_path / "out.jsonl", audit_folder(state) / "public.pem"
    since, until = ["--since", "2026-01-31T14:00Z"], ["--until", "2026-01-31T18:00:00+01:00"]
    said("audit", "export", "--state", state, *since, *until, "--out", out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["object"] for line in lines if "object" in line] == ["run-2", "run-3", "run-4"]
    code, found = verdict(out, "--key", key)
    assert (code, found["first"], found["events"]) == (0, 4, 3)
    whole = said("audit", "export", "--state", state)
    assert whole == "".join(path.read_text() for path in log_files(audit_folder(state)))
    assert "exists already" in refused("audit", "export", "--state", state, "--out", out)[0]


def test_another_key_s_log_is_not_this_one_s(state: Path, tmp_path: Path) -> None:
    other = AuditFiles(tmp_path / "other", lambda: NOON)
    other.close()
    code, found = verdict("--state", state, "--key", tmp_path / "other" / "public.pem")
    assert (code, found["num_faults"]) == (1, 10)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["verify"], "holds no audit log"),
        (["show"], "holds no audit log"),
        (["verify", "--checkpoint", "17"], "allowed is SEQ:DIGEST"),
        (["verify", "nowhere.jsonl"], "there is no nowhere.jsonl"),
        (["export", "--since", "yesterday"], "allowed: a time such as"),
        (
            ["export", "--since", "2026-02-01", "--until", "2026-01-01"],
            "--until 2026-01-01 is not after --since 2026-02-01",
        ),
    ],
)
def test_an_impossible_request_is_refused(tmp_path: Path, arguments: list[str], fault: str) -> None:
    if fault.startswith("allowed: a time"):
        AuditFiles(audit_folder(tmp_path), lambda: NOON).append([Event(instant(NOON), *["x"] * 5)], sign=True)
    assert fault in refused("audit", *arguments, "--state", tmp_path)[0]


def test_all_mistakes_of_a_command_are_reported_at_once(tmp_path: Path) -> None:
    period = refused("audit", "export", "--since", "yesterday", "--until", "today", "--state", tmp_path)
    assert [fault.split(" ")[0] for fault in period] == ["--since", "--until"]
    checkpoints = refused("audit", "verify", "--checkpoint", "17", "--checkpoint", "x:y", "--state", tmp_path)
    assert len(checkpoints) == 2
