"""The alerts of a coordinator: the numbers of `docs/operations/rules.yml`, and what holds when."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from atoll.protocol.notices.book import Book
from atoll.protocol.notices.book_file import FILE, conditions_shown, encoded
from atoll.protocol.notices.notice import Condition, Notice
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.views import alerts
from atoll.server.views.alerts import RunNow, alerts_of
from atoll.server.views.history import History
from atoll.server.views.views import View, look
from tests.server.views.test_history import IN_ROUND_4, write_history

RULES = (Path(__file__).parents[3] / "docs" / "operations" / "rules.yml").read_text("utf-8")
NOW = 100_000.0


def rule(name: str) -> str:
    """Return the text of a rule."""
    return re.split(r"\n      - alert: ", RULES.partition(f"- alert: {name}\n")[2])[0]


def rows(*runs: RunNow, **other: Any) -> list[tuple[str, str, str]]:
    given = {"certificates": (), "notices": (), "now": NOW, "is_attended": True} | other
    return [(row["condition"], row["level"], row["subject"]) for row in alerts_of(runs, **given)]


def ended(phase: str, at: float, seconds: float = 10.0) -> dict[str, Any]:
    return {"phase": phase, "ended_at": at, "seconds": seconds}


def test_every_rule_is_evaluated_or_said_to_be_elsewhere() -> None:
    names = set(re.findall(r"- alert: (\w+)", RULES))
    source = Path(alerts.__file__).read_text("utf-8")
    here = {name for name in names if f'_row("{name}"' in source}
    assert here | alerts.ELSEWHERE.keys() == names
    assert not here & alerts.ELSEWHERE.keys()
    for name in here:
        level = re.search(rf'"{name}", "(\w+)"', source)
        assert level is not None
        assert f"severity: {level[1]}" in rule(name)
        assert f"page: docs/monitoring.md#{name.lower()}" in rule(name)


def test_the_numbers_are_those_of_the_rules() -> None:
    stalled = rule("AtollRunStalled")
    assert f"> {alerts.STALLED_S:.0f} + {alerts.STALLED_ROUNDS} * (" in stalled
    assert f"for: {alerts.STALLED_FOR_S / 60:.0f}m" in stalled
    assert f"[{alerts.ABANDONED_WITHIN_S / 3600:.0f}h]" in rule("AtollRoundsAbandoned")
    assert f">= {alerts.ABANDONED - 0.5:g}" in rule("AtollRoundsAbandoned")
    assert f"< {alerts.CERTIFICATE_S / 86_400:.0f} * 86400" in rule("AtollCertificateEnds")


@pytest.mark.parametrize(("since", "holds"), [(929.0, False), (931.0, True)])
def test_a_run_stalls_after_ten_minutes_three_rounds_and_five_minutes(since: float, holds: bool) -> None:
    run = RunNow("r-1", "running", "", 0.0, [ended("committed", NOW - since), ended("abandoned", NOW - 1)])
    assert rows(run) == ([("AtollRunStalled", "warning", "r-1")] if holds else [])
    assert rows(RunNow("r-1", "running", "", NOW - since + 31, [])) == []
    assert rows(RunNow("r-1", "running", "", 0.0, None)) == []  # of messages


def test_three_abandoned_rounds_of_the_last_hour_hold() -> None:
    recent = [ended("committed", NOW - 1), *(ended("abandoned", NOW - 3_600 + each) for each in range(2))]
    old = [ended("abandoned", NOW - 3_601)] * 5
    assert rows(RunNow("r-1", "running", "", 0.0, [*old, *recent])) == []
    found = rows(RunNow("r-1", "running", "", 0.0, [*old, *recent, ended("abandoned", NOW)]))
    assert found == [("AtollRoundsAbandoned", "warning", "r-1")]


def test_the_critical_come_first_and_a_state_without_a_coordinator_has_no_other_rule() -> None:
    runs = [RunNow("a", "paused", "why", 0.0), RunNow("b", "failed", "", 0.0), RunNow("c", "running", "", 0.0, [])]
    certificates = [("coordinator/coordinator", NOW + 3 * 86_400 - 1), ("aggregator/0", NOW + 3 * 86_400 + 1)]
    assert rows(*runs, certificates=certificates) == [
        ("AtollRunFailed", "critical", "b"),
        ("AtollCertificateEnds", "warning", "coordinator/coordinator"),
        ("AtollRunStalled", "warning", "c"),
        ("run_paused", "warning", "a"),
    ]
    assert rows(*runs, certificates=certificates, is_attended=False) == [
        ("AtollNoCoordinator", "critical", "c"),
        ("AtollRunFailed", "critical", "b"),
        ("run_paused", "warning", "a"),
    ]


def test_a_condition_of_a_run_is_known_by_its_subject() -> None:
    notices = [
        Notice(Condition.APPROVAL, "r-1 at north", "it waits"),
        Notice(Condition.DISK, "r-1", "no room"),
        Notice(Condition.AUDIT, "/state/audit", "broken"),
    ]
    found = alerts_of([RunNow("r-1", "running", "", NOW, [])], [], notices, NOW, is_attended=True)
    assert [(row["condition"], row["run"]) for row in found] == [("audit", ""), ("approval", "r-1"), ("disk", "r-1")]


def test_what_lasts_is_in_the_file_of_notices_with_its_subject(tmp_path: Path) -> None:
    book, away = Book(), Notice(Condition.AWAY, "north", "site north is away", hold=60.0)
    disk, end = Notice(Condition.DISK, "/state", "the disk is full"), Notice(Condition.RUN_PAUSED, "r", "it is paused")
    book.look([away, disk, end], 10.0)
    (tmp_path / FILE).write_bytes(encoded(book))
    assert conditions_shown(tmp_path) == [disk], "an absence that is too short is not told yet"
    for group in book.ready(10.0):
        book.attempted(group, 10.0)
        book.succeeded(group)
    book.look([away, disk, end], 100.0)
    told = json.loads(encoded(book))
    told["told"]["odd of another Atoll"] = {"at": 1.0, "sentence": "odd"}
    told["lasting"].append("odd")
    (tmp_path / FILE).write_text(json.dumps(told))
    found = [(each.condition, each.subject, each.sentence) for each in conditions_shown(tmp_path)]
    assert found == [("away", "north", away.sentence), ("disk", "/state", disk.sentence)]


def test_the_view_reads_the_runs_and_their_rounds(tmp_path: Path) -> None:
    with StateDirectory.open(tmp_path / "state") as state:
        write_history(state, IN_ROUND_4)
        found = look(History(state.path), View.ALERTS)
        assert [(row["condition"], row["run"]) for row in found] == [("AtollRunStalled", "r")], "this test holds it"
    found = look(History(tmp_path / "state"), View.ALERTS)
    assert [(row["condition"], row["run"]) for row in found] == [("AtollNoCoordinator", "r")]
