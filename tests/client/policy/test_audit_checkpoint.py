"""The checkpoints of the coordinator's audit log in the site's own log."""

from pathlib import Path

import pytest

from atoll.client.policy.decisions import DecisionLog
from atoll.client.policy.gate import Gate
from atoll.server.audit.reading import Source, events_of, verify

ONE, TWO = f"17:{'ab' * 32}", f"40:{'cd' * 32}"


def checkpoints(folder: Path) -> list[tuple[str, str]]:
    source = Source.of_files(sorted((folder / "decisions").glob("audit-*.jsonl")))
    assert verify(source).faults == []
    events = (line.event for line in events_of(source))
    return [(event.object, event.outcome) for event in events if event is not None]


def test_each_checkpoint_is_written_down_once(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path, lambda: 1.8e9)
    for checkpoint in ("", ONE, ONE, TWO, ""):
        log.note_checkpoint(checkpoint)
    log.close()
    assert checkpoints(tmp_path) == [("line 17", ONE), ("line 40", TWO)]


def test_what_is_no_checkpoint_is_said_and_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(None, tmp_path)
    gate.note_checkpoint("17")
    gate.note_checkpoint(ONE)
    gate.close()
    assert checkpoints(tmp_path) == [("line 17", ONE)]
    assert "cannot be recorded: checkpoint '17': allowed is SEQ:DIGEST" in caplog.text
