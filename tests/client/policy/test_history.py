"""The history for a site's policy: durable, bound to the terms, and unusable when it cannot be read."""

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from atoll.client.policy.decide import History, Kind, PolicyRequest, Standing
from atoll.client.policy.history import NAME, RUNS_MAX, HistoryUnusable, NoSuchRun, PolicyHistory
from atoll.client.policy.promise_store import PromiseStore
from tests.server.sessions.small_federation import terms_of
from tests.waiting import BOUND_S

DAY = "2026-05-04"


NEXT_DAY = "2026-05-05"


def request(number: int = 1, run_id: str = "r-1", task: str = "t", **fields: Any) -> PolicyRequest:
    return PolicyRequest(**({"kind": Kind.TRAIN, "run_id": run_id, "task": task, "number": number} | fields))


def asked(history: PolicyHistory, run_id: str, task: str, local: str, at: float, **terms: Any) -> bool:
    """Let a run ask: for an evaluation, or with an algorithm for a training."""
    kind = Kind.TRAIN if "algorithm" in terms else Kind.EVALUATE
    return history.asked(PolicyRequest(kind=kind, run_id=run_id, task=task, number=1, local=local, **terms), at)


def upload(number: int = 1, content: str = "u") -> PolicyRequest:
    return request(number, kind=Kind.UPLOAD, content=content)


def test_rounds_are_counted_once_and_by_day(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    for number in (1, 1, 2):
        history.count(request(number), DAY)
    assert history.of(request(1), day=DAY) == History(rounds_today=2, is_counted=True, turn=1)
    assert history.of(request(3), day=NEXT_DAY) == History(rounds_today=0, is_counted=False, turn=1)


def test_other_work_of_the_same_round_counts_and_so_does_the_same_on_another_day(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    history.count(request(content="a"), DAY)
    assert history.of(request(content="b"), day=DAY) == History(rounds_today=1, is_counted=False, turn=2)
    history.count(request(content="b"), DAY)
    assert [history.of(request(content=work), day=DAY).is_counted for work in "ab"] == [True, True]
    assert history.of(request(content="a"), day=NEXT_DAY) == History(rounds_today=0, is_counted=False, turn=3)
    assert history.of(upload(), day=NEXT_DAY).is_counted, "what was begun may leave on another day"


def test_with_its_update_a_round_is_over_and_only_that_update_goes_on(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    for work in "ab":
        history.count(request(content=work), DAY)
    history.count(upload(content="u"), DAY)
    assert history.of(upload(content="u"), day=NEXT_DAY) == History(rounds_today=0, is_counted=True, turn=2)
    asked = [request(content="a"), request(content="b"), upload(content="v")]
    assert [history.of(again, day=DAY) for again in asked] == [History(rounds_today=2, turn=3)] * 3
    history.count(upload(content="u"), DAY)
    assert history.of(request(2), day=DAY).rounds_today == 2
    history.count(request(content="a"), DAY)
    assert history.of(upload(content="u"), day=DAY) == History(rounds_today=3, is_counted=True, turn=3)


def test_an_update_that_nobody_counted_counts_when_it_leaves(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    history.count(upload(), DAY)
    history.count(upload(), DAY)
    assert history.of(request(2), day=DAY).rounds_today == 1


def test_an_evaluation_is_no_round(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    history.count(request(1), DAY)
    assert history.of(request(1, kind=Kind.EVALUATE), day=DAY) == History(rounds_today=1)


@pytest.mark.real
def test_what_was_counted_and_decided_survives_kill_9(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from atoll.client.policy.decide import Kind, PolicyRequest, Standing
from atoll.client.policy.history import PolicyHistory
history = PolicyHistory(Path({str(tmp_path)!r}))
history.asked(PolicyRequest(kind=Kind.EVALUATE, run_id="r-1", task="t", number=1, local="{{}}"), 1.0)
history.decided("r-1", Standing.APPROVED, 2.0)
round_7 = PolicyRequest(kind=Kind.TRAIN, run_id="r-1", task="t", number=7, local="{{}}", content="a")
history.count(round_7, {DAY!r})
update = PolicyRequest(kind=Kind.UPLOAD, run_id="r-1", task="t", number=6, content="u")
history.count(update, {DAY!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=BOUND_S)
    assert done.returncode == -signal.SIGKILL
    history = PolicyHistory(tmp_path)
    found = history.of(request(7, local="{}", content="a"), day=DAY)
    terms = history.runs()[0].fingerprint
    assert found == History(standing=Standing.APPROVED, rounds_today=2, is_counted=True, turn=1, terms=terms)
    assert not history.of(request(6, local="{}", content="a"), day=DAY).is_counted, "its update may have left"


def test_an_approval_is_for_the_terms_it_was_given_on(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)

    def standing(task: str = "t", local: str | None = "{}") -> Standing:
        return history.of(request(task=task, local=local), day=DAY).standing

    assert asked(history, "r-1", "t", "{}", 1.0)
    assert not asked(history, "r-1", "t", "{}", 2.0)
    history.decided("r-1", Standing.APPROVED, 3.0)
    assert [standing(), standing(local=None)] == [Standing.APPROVED] * 2
    assert [standing(task="u"), standing(local='{"lr":1}')] == [Standing.UNDECIDED] * 2
    assert asked(history, "r-1", "t", '{"lr":1}', 4.0)
    assert standing(local='{"lr":1}') is Standing.UNDECIDED
    history.decided("r-1", Standing.REJECTED, 5.0)
    assert asked(history, "r-1", "u", "{}", 6.0)
    assert standing(task="u") is Standing.REJECTED, "other terms do not undo a rejection"


def test_an_approval_is_for_an_algorithm_and_a_codec(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)

    def standing(algorithm: str | None, codec: str | None) -> Standing:
        return history.of(request(local="{}", algorithm=algorithm, codec=codec), day=DAY).standing

    assert asked(history, "r-1", "t", "{}", 1.0, algorithm="fedavg", codec="")
    history.decided("r-1", Standing.APPROVED, 2.0)
    assert not asked(history, "r-1", "t", "{}", 3.0), "an evaluation asks for nothing else"
    assert [standing("fedavg", ""), standing(None, None)] == [Standing.APPROVED] * 2
    assert [standing("scaffold", ""), standing("fedavg", "topk:0.01")] == [Standing.UNDECIDED] * 2
    assert asked(history, "r-1", "t", "{}", 4.0, algorithm="fedavg", codec="topk:0.01")
    assert [(terms.algorithm, terms.codec, terms.standing) for terms in history.runs()] == [
        ("fedavg", "topk:0.01", Standing.UNDECIDED)
    ]


def test_an_approval_of_evaluations_is_none_of_training(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    asked(history, "r-1", "t", "{}", 1.0)
    history.decided("r-1", Standing.APPROVED, 2.0)
    trained = request(local="{}", algorithm="fedavg", codec="")
    assert history.of(request(local="{}"), day=DAY).standing is Standing.APPROVED
    assert history.of(trained, day=DAY).standing is Standing.UNDECIDED
    assert asked(history, "r-1", "t", "{}", 3.0, algorithm="fedavg", codec="")
    assert history.of(request(local="{}"), day=DAY).standing is Standing.UNDECIDED


SCHEMA_1 = """
CREATE TABLE runs (run_id TEXT PRIMARY KEY, task TEXT NOT NULL, local TEXT NOT NULL, standing TEXT NOT NULL,
                   asked_at REAL NOT NULL, decided_at REAL) STRICT, WITHOUT ROWID;
CREATE TABLE rounds (run_id TEXT, round_id INTEGER, day TEXT NOT NULL, PRIMARY KEY (run_id, round_id)) STRICT;
CREATE INDEX rounds_by_day ON rounds (day);
INSERT INTO runs VALUES ('r-1', 't', '{}', 'approved', 1.0, 2.0), ('r-2', 't', '{}', 'rejected', 1.0, 2.0);
INSERT INTO rounds VALUES ('r-1', 7, '2026-05-04');
PRAGMA user_version = 1;
"""


def test_what_an_older_atoll_approved_must_be_approved_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sqlite3.connect(tmp_path / NAME) as database:
        database.executescript(SCHEMA_1)
    database.close()
    history = PolicyHistory(tmp_path)
    assert "the approval of run r-1 names no algorithm and no codec and must be given again" in caplog.text
    assert [terms.standing for terms in history.runs()] == [Standing.UNDECIDED, Standing.REJECTED]
    assert history.of(request(local="{}"), day=DAY).standing is Standing.UNDECIDED
    [terms] = [run.fingerprint for run in history.runs() if run.run_id == request(7).run_id]
    assert history.of(request(7), day=DAY) == History(rounds_today=1, is_counted=True, turn=1, terms=terms)
    assert not history.of(request(7, content="a"), day=DAY).is_counted, "the content of that training is unknown"
    history.count(request(7, content="a"), DAY)
    history.close()
    assert PolicyHistory(tmp_path).of(request(8), day=DAY).rounds_today == 2


SCHEMA_2 = """
CREATE TABLE runs (run_id TEXT PRIMARY KEY, task TEXT NOT NULL, local TEXT NOT NULL, standing TEXT NOT NULL,
                   asked_at REAL NOT NULL, decided_at REAL, algorithm TEXT NOT NULL, codec TEXT NOT NULL)
                  STRICT, WITHOUT ROWID;
CREATE TABLE rounds (run_id TEXT NOT NULL, round_id INTEGER NOT NULL, work TEXT NOT NULL, day TEXT NOT NULL,
                     sent TEXT) STRICT;
CREATE INDEX rounds_by_round ON rounds (run_id, round_id);
CREATE INDEX rounds_by_day ON rounds (day);
INSERT INTO runs VALUES ('r-1', 't', '{}', 'approved', 1.0, 2.0, 'fedavg', '');
PRAGMA user_version = 2;
"""


def test_an_approval_without_metrics_is_for_sums_over_all_sites(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / NAME) as database:
        database.executescript(SCHEMA_2)
    database.close()
    history = PolicyHistory(tmp_path)

    def standing(metrics: str) -> Standing:
        return history.of(request(local="{}", algorithm="fedavg", codec="", metrics=metrics), day=DAY).standing

    assert [standing("merged"), standing("per_site")] == [Standing.APPROVED, Standing.UNDECIDED]
    assert asked(history, "r-1", "t", "{}", 3.0, algorithm="fedavg", codec="", metrics="per_site")
    assert standing("per_site") is Standing.UNDECIDED, "to let more leave needs a new approval"
    history.decided("r-1", Standing.APPROVED, 4.0)
    assert standing("per_site") is Standing.APPROVED
    history.close()
    assert PolicyHistory(tmp_path).runs()[0].metrics == "per_site"


SCHEMA_4 = """
CREATE TABLE runs (run_id TEXT PRIMARY KEY, task TEXT NOT NULL, local TEXT NOT NULL, standing TEXT NOT NULL,
                   asked_at REAL NOT NULL, decided_at REAL, algorithm TEXT NOT NULL, codec TEXT NOT NULL,
                   metrics TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE rounds (run_id TEXT NOT NULL, round_id INTEGER NOT NULL, work TEXT NOT NULL, day TEXT NOT NULL,
                     sent TEXT) STRICT;
CREATE INDEX rounds_by_round ON rounds (run_id, round_id);
CREATE INDEX rounds_by_day ON rounds (day);
CREATE TABLE rollbacks (run_id TEXT PRIMARY KEY, accepted_at REAL NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO runs VALUES ('r-1', 't', '{}', 'approved', 1.0, 2.0, 'fedavg', '', 'merged');
INSERT INTO rounds VALUES ('r-1', 7, 'w', '2026-05-04', NULL);
INSERT INTO rollbacks VALUES ('r-2', 3.0);
PRAGMA user_version = 4;
"""


def test_approvals_of_plain_runs_outlive_the_schema_of_secure_sums(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / NAME) as database:
        database.executescript(SCHEMA_4)
    database.close()
    history = PolicyHistory(tmp_path)
    [run] = history.runs()
    before = hashlib.sha256(b'["t", "{}", "fedavg", "", "merged"]').hexdigest()[:24]
    assert (run.standing, run.secure, run.fingerprint) == (Standing.APPROVED, "", before)
    found = history.of(request(7, local="{}", algorithm="fedavg", codec="", content="w"), day=DAY)
    assert (found.standing, found.is_counted, history.accepted_rollbacks()) == (Standing.APPROVED, True, ["r-2"])
    store = PromiseStore(history.database)
    assert (store.num_promises, store.site_key, store.fault) == (0, b"", "")


@pytest.mark.parametrize("schema", [SCHEMA_1, SCHEMA_2, SCHEMA_4])
def test_every_older_file_gets_the_tables_of_a_new_one(tmp_path: Path, schema: str) -> None:
    def tables(folder: Path) -> dict[str, list[tuple[str, ...]]]:
        PolicyHistory(folder).close()
        with closing(sqlite3.connect(folder / NAME)) as database:
            names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            return {name: [row[1:4] for row in database.execute(f"PRAGMA table_info({name})")] for name in names}

    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    with closing(sqlite3.connect(old / NAME)) as database:
        database.executescript(schema)
    assert tables(old) == tables(new)


SUMS = {"local": "{}", "algorithm": "fedavg", "codec": "", "metrics": "merged"}


def test_an_approval_is_for_the_terms_of_the_secure_sums(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)

    def standing(**fields: Any) -> Standing:
        return history.of(request(**(SUMS | fields)), day=DAY).standing

    def asks(**fields: Any) -> bool:
        return history.asked(request(**(SUMS | fields)), 1.0)

    assert asks(terms=terms_of())
    history.decided("r-1", Standing.APPROVED, 2.0)
    same = [terms_of(round=9, attempt=2, session=3, base=7, model="cd" * 32, ranges="cd" * 32)]
    assert [standing(terms=terms) for terms in (terms_of(), *same)] == [Standing.APPROVED] * 2
    assert not asks(terms=same[0]), "every round has its own base, attempt and ranges"
    others: list[Any] = [{"clip_norm": 2.0}, {"bits": 64}, {"examples_max": 0}, {"threshold": "3"}, {"frozen": "ab"}]
    others += [{"members_max": 5}, {"layout": "cd" * 32}, {"privacy": "{}"}, {"receivers": (0,)}, {"local": "{1}"}]
    assert {standing(terms=terms_of(**other)) for other in others} == {Standing.UNDECIDED}
    assert standing(terms=None) is Standing.UNDECIDED, "a plain training lets more leave"
    assert standing(kind=Kind.UPLOAD, local=None, algorithm=None) is Standing.APPROVED
    assert asks(terms=terms_of(clip_norm=2.0))
    assert standing(terms=terms_of(clip_norm=2.0)) is Standing.UNDECIDED


def test_an_approval_of_a_training_in_sums_covers_evaluations_in_sums_alone(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    evaluation = {"kind": Kind.EVALUATE, "local": "{}", "metrics": "merged"}
    history.asked(request(**SUMS, terms=terms_of()), 1.0)
    history.decided("r-1", Standing.APPROVED, 2.0)
    in_sums = request(**evaluation, terms=terms_of(purpose="evaluation"))
    assert history.of(in_sums, day=DAY).standing is Standing.APPROVED
    assert not history.asked(in_sums, 3.0)
    assert history.of(request(**evaluation), day=DAY).standing is Standing.UNDECIDED


def test_the_terms_are_shown_with_another_fingerprint_than_a_plain_run(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    prints = set()
    for terms in (None, terms_of(), terms_of(bits=64)):
        history.asked(request(**SUMS, terms=terms), 1.0)
        prints.add(history.runs()[0].fingerprint)
    assert len(prints) == 3


def test_all_attempts_at_one_masked_update_are_one_upload(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    history.count(request(content="a"), DAY)
    for attempt in ("u", "v"):
        masked = request(kind=Kind.UPLOAD, content=attempt, is_masked=True)
        assert history.of(masked, day=NEXT_DAY).is_counted
        history.count(masked, NEXT_DAY)
    assert history.of(request(2), day=DAY).rounds_today == 1
    assert not history.of(upload(content="u"), day=DAY).is_counted, "a plain one is another update"


def test_who_never_asked_cannot_be_decided_about_or_forgotten(tmp_path: Path) -> None:
    history = PolicyHistory(tmp_path)
    for change in (lambda: history.decided("r-1", Standing.APPROVED, 1.0), lambda: history.forget("r-1")):
        with pytest.raises(NoSuchRun):
            change()
    assert history.runs() == []
    asked(history, "r-1", "t", "{}", 1.0)
    history.forget("r-1")
    assert history.runs() == []


def test_another_process_is_noticed(tmp_path: Path) -> None:
    agent, command = PolicyHistory(tmp_path), PolicyHistory(tmp_path)
    asked(agent, "r-1", "t", "{}", 1.0)
    before = agent.change
    assert agent.change == before
    command.decided("r-1", Standing.APPROVED, 2.0)
    assert agent.change != before


def test_runs_that_nobody_decided_about_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.client.policy.history.RUNS_MAX", 3)
    assert RUNS_MAX > 3
    history = PolicyHistory(tmp_path)
    asked(history, "kept", "t", "{}", 0.0)
    history.decided("kept", Standing.REJECTED, 0.5)
    for number in range(6):
        asked(history, f"r-{number}", "t", "{}", 1.0 + number)
    assert [terms.run_id for terms in history.runs()] == ["kept", "r-3", "r-4", "r-5"]


@pytest.mark.parametrize("damage", ["garbage", "newer", "standing"])
def test_what_cannot_be_read_gives_no_answer(tmp_path: Path, damage: str) -> None:
    if damage == "garbage":
        (tmp_path / NAME).write_bytes(b"no database" * 1000)
    else:
        asked(PolicyHistory(tmp_path), "r-1", "t", "{}", 1.0)
        with sqlite3.connect(tmp_path / NAME) as database:
            change = "PRAGMA user_version = 9" if damage == "newer" else "UPDATE runs SET standing = 'fine'"
            database.execute(change)
        database.close()
    with pytest.raises(HistoryUnusable, match=NAME):
        PolicyHistory(tmp_path).of(request(), day=DAY)
