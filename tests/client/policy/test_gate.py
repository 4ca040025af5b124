"""The gate: its log, its count of rounds, and that every failure of it allows nothing."""

import errno
import json
import os
import random
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.client.disk.spool import Entry, Spool
from atoll.client.policy.decide import Decision, Kind, Outcome, PolicyRequest, Rule, Standing
from atoll.client.policy.gate import Gate, content_of, failure_of
from atoll.client.policy.history import NAME, PolicyHistory
from atoll.client.secure.promises import Kind as Kind_
from atoll.client.secure.promises import promise_of
from atoll.client.session.events import EvaluationRequest, Invitation, StatisticsRequest
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import ClientId, Digest, FailureReason, RoundId, RunId, Version
from atoll.tensors.safetensors_file import write
from atoll.tensors.secure.masked_layout import EXACT
from tests.cli.invoking import invoke, shown
from tests.client.fake_coordinator import Version as Model
from tests.client.fake_coordinator import model
from tests.server.sessions.small_federation import terms_of

POLICY = 'tasks = ["t"]\nruns = ["*"]\n'
RUN = RunId("r-1")
DAY_S = 86400.0


def written(folder: Path) -> list[dict[str, Any]]:
    """The events of a log of decisions."""
    files = sorted((folder / "decisions").glob("audit-*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if "action" in line]


class Site:
    """A gate with a clock of its own, at 12:00 UTC on a Monday."""

    def __init__(self, folder: Path, extra: str = "", **fields: Any) -> None:
        self.folder, self.path, self.now = folder, folder / "policy.toml", 1_777_896_000.0
        self.path.write_text(POLICY + extra)
        self.gate = Gate(self.path, folder, lambda: self.now)

    def lines(self) -> list[dict[str, Any]]:
        return written(self.folder)

    def changes(self, extra: str) -> bool:
        self.path.write_text(POLICY + extra)
        return [self.gate.poll(), self.gate.poll()][-1]


def invitation(number: int = 1, *, task: str = "t", **fields: Any) -> Invitation:
    return Invitation(RUN, RoundId(number), task, Version(0), Digest("v"), 60.0, **fields)


def question(number: int = 1) -> EvaluationRequest:
    return EvaluationRequest(RUN, Version(number), "t", Digest("v"), 60.0)


def version(**sizes: int) -> Any:
    return Model(model(**(sizes or {"w": 10}))).manifest


def spooled(folder: Path, number: int = 1, size: int = 10, work: float = 1.0, name: str = "w") -> Entry:
    (folder / "spool").mkdir(exist_ok=True)
    pieces = write(folder / "u", {name: np.ones(size, np.float32)})
    manifest = UpdateManifest(
        RUN, RoundId(number), ClientId("north"), Version(0), Digest("0" * 64), num_examples=1, work=work, pieces=pieces
    )
    return Spool(folder / "spool", 2**30).add(folder / "u", manifest, statistics={})


def test_each_decision_is_written_down_once_with_its_rule(tmp_path: Path) -> None:
    site = Site(tmp_path, "upload_max_bytes = 39\n")
    assert site.gate.ask(invitation()).is_allowed
    assert site.lines() == [], "nothing is decided before the model is known"
    for _ in range(2):
        assert site.gate.admit(invitation(), version()).rule is Rule.UPLOAD_MAX_BYTES
    assert site.gate.admit(question(), version()).is_allowed
    assert site.gate.ask(invitation(2, task="u")).rule is Rule.TASKS
    assert [(line["action"], line["outcome"].split(":")[0]) for line in site.lines()] == [
        ("train.refused", "upload_max_bytes"),
        ("evaluate.allowed", "none_objects"),
        ("train.refused", "tasks"),
    ]
    first = site.lines()[0]
    assert (first["time"], first["actor"], first["object"]) == ("2026-05-04T12:00:00.000000Z", "r-1", "round 1")
    assert first["digests"] == {"task": "t", "bytes": "40", "work": content_of(invitation())}
    assert first["outcome"] == "upload_max_bytes: an update of 40 bytes may not leave; allowed: at most 39"
    assert site.lines()[1]["object"] == "version 1"


def survey(number: int = 1) -> StatisticsRequest:
    return StatisticsRequest(RunId("r-statistics"), number, "t", 60.0, '{"task.scale": 1}')


def test_a_request_for_statistics_is_logged_also_when_it_is_allowed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert site.gate.ask(survey()).rule is Rule.STATISTICS, "a file that says nothing lets none leave"
    assert site.changes('statistics = "merged"\n')
    assert site.gate.ask(survey(2)).is_allowed
    assert site.gate.ask(survey(2)).is_allowed
    assert [(line["action"], line["object"], line["actor"]) for line in site.lines()] == [
        ("statistics.refused", "request 1", "r-statistics"),
        ("statistics.allowed", "request 2", "r-statistics"),
    ]


def test_an_approval_of_statistics_holds_for_all_requests_on_its_terms_and_for_nothing_else(tmp_path: Path) -> None:
    allowing = 'approval = "each_run"\nstatistics = "merged"\n'
    site = Site(tmp_path, allowing)
    assert site.gate.ask(survey()).rule is Rule.APPROVAL
    with closing(PolicyHistory(tmp_path)) as history:
        history.decided("r-statistics", Standing.APPROVED, site.now)
    assert site.gate.ask(survey(2)).is_allowed
    assert not site.gate.ask(replace(survey(3), local='{"task.scale": 2}')).is_allowed
    with closing(PolicyHistory(tmp_path)) as history:
        history.decided("r-statistics", Standing.APPROVED, site.now)
    for line in ("statistics_min_count = 3\n", "statistics_extremes = true\n", "statistics_min_sites = 3\n"):
        site.changes(allowing + line)
        assert site.gate.ask(survey()).rule is Rule.APPROVAL, line


def test_no_statistics_leave_while_the_policy_is_not_valid(tmp_path: Path) -> None:
    site = Site(tmp_path, 'statistics = "per_site"\nstatistics_extremes = true\nstatistics_min_count = 1\n')
    terms = site.gate.statistics_terms
    assert (str(terms.disclosure), terms.min_count, terms.extremes) == ("per_site", 1, True)
    site.changes("statistics = 7\n")
    assert site.gate.ask(survey()).rule is Rule.POLICY_FILE
    terms = site.gate.statistics_terms
    assert (str(terms.disclosure), terms.extremes) == ("none", False)


def test_the_log_is_a_chain_that_is_signed_soon_and_goes_on_after_a_crash(tmp_path: Path) -> None:
    site = Site(tmp_path)

    def verdict() -> dict[str, Any]:
        log, key = tmp_path / "decisions", tmp_path / "decisions" / "public.pem"
        found: dict[str, Any] = shown("audit", "verify", *sorted(log.glob("audit-*.jsonl")), "--key", key)
        return {name: found[name] for name in ("events", "checkpoints", "unsigned", "num_faults")}

    site.gate.admit(invitation(1), version())
    site.gate.poll()
    assert verdict() == {"events": 1, "checkpoints": 0, "unsigned": 1, "num_faults": 0}
    site.now += 5
    site.gate.poll()
    assert verdict() == {"events": 1, "checkpoints": 1, "unsigned": 0, "num_faults": 0}
    again = Site(tmp_path)  # the first is never closed, as by kill -9
    again.gate.admit(invitation(2), version())
    again.gate.close()
    assert verdict() == {"events": 2, "checkpoints": 2, "unsigned": 0, "num_faults": 0}
    [log] = (tmp_path / "decisions").glob("audit-*.jsonl")
    log.write_bytes(log.read_bytes().replace(b"train.allowed", b"train.refused", 1))
    assert invoke("audit", "verify", log).exit_code == 1


def test_a_codec_makes_the_update_smaller_than_the_model(tmp_path: Path) -> None:
    site = Site(tmp_path, "upload_max_bytes = 3000\n")
    assert not site.gate.admit(invitation(codec="bf16"), version(w=2000)).is_allowed
    assert site.gate.admit(invitation(codec="qsgd8"), version(w=2000)).is_allowed
    assert site.lines()[-1]["digests"]["bytes"] == str(2000 + 4 * 4)


def test_rows_to_append_are_not_as_many_as_the_model_has_and_are_weighed_before_their_upload(tmp_path: Path) -> None:
    site, entry = Site(tmp_path, "upload_max_bytes = 100\n"), spooled(tmp_path, size=20)
    assert site.gate.admit(invitation(algorithm="concatenate"), version(w=2000)).is_allowed
    assert site.gate.ask_upload(entry).rule is Rule.UPLOAD_MAX_BYTES


def test_the_size_of_an_update_is_that_of_the_real_one_with_its_manifest(tmp_path: Path) -> None:
    entry = spooled(tmp_path)
    size = 40 + len(entry.manifest)
    site = Site(tmp_path, f"upload_max_bytes = {size - 1}\n")
    site.gate.admit(invitation(), version())
    refused = site.gate.ask_upload(entry)
    assert (refused.outcome, refused.rule) == (Outcome.REFUSED, Rule.UPLOAD_MAX_BYTES)
    assert site.lines()[-1]["digests"]["bytes"] == str(size)
    assert site.changes(f"upload_max_bytes = {size}\n")
    assert site.gate.ask_upload(entry).is_allowed


def test_an_update_from_before_the_policy_is_asked_about_as_well(tmp_path: Path) -> None:
    site = Site(tmp_path, "rounds_per_day = 0\n")
    entry = spooled(tmp_path)
    assert site.gate.ask_upload(entry).rule is Rule.TASKS, "the task that it was trained for is unknown"
    asks = PolicyRequest(kind=Kind.EVALUATE, run_id=RUN, task="t", number=1, local="{}")
    PolicyHistory(tmp_path).asked(asks, 1.0)
    assert site.gate.ask_upload(entry).rule is Rule.ROUNDS_PER_DAY


def test_a_round_is_counted_when_it_is_admitted_and_once(tmp_path: Path) -> None:
    site = Site(tmp_path, "rounds_per_day = 2\n")
    for number in (1, 1, 2):
        assert site.gate.ask(invitation(number)).is_allowed
        assert site.gate.admit(invitation(number), version()).is_allowed
    site.gate.close()
    again = Site(tmp_path, "rounds_per_day = 2\n")  # as after a restart
    assert again.gate.ask(invitation(3)).rule is Rule.ROUNDS_PER_DAY
    assert again.gate.admit(invitation(2), version()).is_allowed, "it was begun before"
    assert not again.gate.poll()
    again.now += DAY_S
    assert again.gate.poll(), "on the next day it may be asked again"
    assert again.gate.admit(invitation(3), version()).is_allowed


def test_a_round_that_is_told_again_with_other_words_counts_again(tmp_path: Path) -> None:
    site = Site(tmp_path, "rounds_per_day = 1\n")
    assert site.gate.admit(invitation(), version()).is_allowed
    for other in ({"local": '{"lr":9}'}, {"seed": 8}, {"codec": "bf16"}, {"algorithm": "fedprox"}, {"model_seed": 1}):
        assert site.gate.ask(invitation(**other)).rule is Rule.ROUNDS_PER_DAY
        assert site.gate.admit(invitation(**other), version()).rule is Rule.ROUNDS_PER_DAY
    assert site.gate.admit(invitation(), version()).is_allowed, "the client reconnected and is invited again"


def test_a_round_whose_update_has_left_is_not_begun_again_for_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path, "rounds_per_day = 1\n")
    site.gate.admit(invitation(), version())
    assert site.gate.ask_upload(entry := spooled(tmp_path)).is_allowed
    assert site.gate.ask(invitation()).rule is Rule.ROUNDS_PER_DAY
    again = Site(tmp_path, "rounds_per_day = 1\n")  # the first is never closed, as by kill -9
    assert again.gate.admit(invitation(), version()).rule is Rule.ROUNDS_PER_DAY
    assert again.gate.ask_upload(spooled(tmp_path, work=0.5)).rule is Rule.ROUNDS_PER_DAY
    again.now += DAY_S
    assert again.gate.ask_upload(entry).is_allowed, "the same bytes again are the same update"
    assert again.gate.admit(invitation(), version()).is_allowed, "it is the day's one round"
    assert again.gate.ask(invitation(2)).rule is Rule.ROUNDS_PER_DAY


def test_an_update_that_was_trained_without_a_policy_counts_when_it_leaves(tmp_path: Path) -> None:
    Gate(None, tmp_path).admit(invitation(), version())
    site = Site(tmp_path, "rounds_per_day = 1\n")
    assert site.gate.ask_upload(spooled(tmp_path)).is_allowed
    assert site.gate.ask(invitation(2)).rule is Rule.ROUNDS_PER_DAY
    assert site.gate.ask_upload(spooled(tmp_path, 3)).rule is Rule.ROUNDS_PER_DAY


def test_each_training_and_each_update_that_leaves_has_its_line(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for _ in range(3):
        for _ in range(2):  # it is invited again before anything has left
            site.gate.admit(invitation(), version())
        for _ in range(2):  # the connection is cut
            site.gate.ask_upload(entry := spooled(tmp_path))
    other = spooled(tmp_path, work=0.5)
    site.gate.ask_upload(other)
    assert [line["action"] for line in site.lines()] == ["train.allowed", "upload.allowed"] * 3 + ["upload.allowed"]
    updates = [line["digests"]["update"] for line in site.lines() if line["action"] == "upload.allowed"]
    assert updates == [entry.digest] * 3 + [other.digest]


@pytest.mark.parametrize("other", [{"codec": "topk:0.01"}, {"algorithm": "scaffold"}])
def test_an_approval_does_not_cover_another_algorithm_or_codec(tmp_path: Path, other: dict[str, str]) -> None:
    site = Site(tmp_path, 'approval = "each_run"\n')
    site.gate.ask(invitation())
    PolicyHistory(tmp_path).decided(RUN, Standing.APPROVED, 1.0)
    assert site.gate.ask(invitation(2)).is_allowed
    assert site.gate.admit(question(), version()).is_allowed
    assert site.gate.ask(invitation(3, **other)).rule is Rule.APPROVAL
    [shown_run] = shown("site", "list", "--state", tmp_path)
    terms = {"algorithm": "fedavg", "codec": ""} | other
    assert {name: shown_run[name] for name in terms} == terms
    assert shown_run["standing"] == "undecided"
    for word in filter(None, terms.values()):
        assert word in invoke("site", "list", "--state", tmp_path).stdout
        assert word in invoke("site", "approve", RUN, "--state", tmp_path).stdout


def test_a_run_that_has_only_asked_for_evaluations_is_shown_as_that(tmp_path: Path) -> None:
    Site(tmp_path).gate.ask(question())
    assert (
        "task t with evaluations, metrics merged, local = {}"
        in invoke("site", "approve", RUN, "--state", tmp_path).stdout
    )


def test_the_texts_of_errors_leave_only_where_the_policy_says_so(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert not site.gate.error_details
    site.changes("error_details = true\n")
    assert site.gate.error_details
    site.changes("error_details = 1\n")
    assert not site.gate.error_details, "a policy that is not valid allows nothing"
    assert Gate(None, tmp_path).error_details


def test_metrics_leave_as_the_policy_says(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert str(site.gate.disclosure) == "merged", "a policy file that does not name them"
    assert site.changes('metrics = "per_site"\nmetrics_min_sites = 3\n')
    assert str(site.gate.disclosure) == "per_site, sums of at least 3 sites"
    assert site.gate.ask(question()).is_allowed
    assert site.changes('metrics = "none"\n')
    assert str(site.gate.disclosure) == "none"
    assert (site.gate.ask(question()).rule, site.gate.ask(invitation()).is_allowed) == (Rule.METRICS, True)
    site.changes("metrics = 1\n")
    assert str(site.gate.disclosure) == "none", "a policy that is not valid allows nothing"
    assert str(Gate(None, tmp_path).disclosure) == "per_site"


def test_an_approval_is_for_the_metrics_that_leave(tmp_path: Path) -> None:
    site = Site(tmp_path, 'approval = "each_run"\n')
    site.gate.ask(invitation())
    PolicyHistory(tmp_path).decided(RUN, Standing.APPROVED, 1.0)
    assert site.gate.ask(invitation(2)).is_allowed
    site.changes('approval = "each_run"\nmetrics = "per_site"\n')
    assert site.gate.ask(invitation(3)).rule is Rule.APPROVAL


def test_an_approval_from_another_process_is_noticed(tmp_path: Path) -> None:
    site = Site(tmp_path, 'approval = "each_run"\n')
    waiting = site.gate.ask(invitation())
    assert (waiting.outcome, failure_of(waiting)) == (Outcome.WAITING, FailureReason.AWAITS_APPROVAL)
    assert not site.gate.poll()
    PolicyHistory(tmp_path).decided(RUN, Standing.APPROVED, 1.0)
    assert site.gate.poll()
    assert site.gate.ask(invitation(2)).is_allowed
    assert site.gate.ask(invitation(2, local='{"epochs": 99}')).rule is Rule.APPROVAL
    PolicyHistory(tmp_path).decided(RUN, Standing.REJECTED, 1.0)
    assert site.gate.poll()
    assert failure_of(site.gate.ask(question())) is FailureReason.POLICY_REFUSED


def test_the_hours_begin_and_end_without_a_question(tmp_path: Path) -> None:
    site = Site(tmp_path, '[hours]\nbegin = "12:00"\nend = "13:00"\n')
    assert site.gate.ask(invitation()).is_allowed
    assert not site.gate.poll()
    site.now += 3600
    assert site.gate.poll()
    assert site.gate.ask(invitation()).rule is Rule.HOURS
    assert site.gate.ask_upload(spooled(tmp_path)).outcome is not Outcome.ALLOWED


# ---------------------------------------------------------------- fails closed


def nothing_is_allowed(site: Site, rule: Rule) -> None:
    gate, asked = site.gate, invitation(9)
    answers = [gate.ask(asked), gate.admit(asked, version()), gate.admit(question(), version())]
    answers.append(gate.ask_upload(spooled(site.folder, 9)))
    assert {(answer.outcome, answer.rule) for answer in answers} == {(Outcome.WAITING, rule)}


def test_while_the_file_is_not_valid_nothing_is_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(tmp_path)
    assert site.changes("upload_max = 5\n")
    assert f"{site.path}: upload_max: unknown key" in caplog.text
    nothing_is_allowed(site, Rule.POLICY_FILE)
    assert site.lines()[-1]["outcome"].startswith("policy_file: ")
    site.path.unlink()
    assert [site.gate.poll(), site.gate.poll()] == [False, False], "nothing is allowed as before"
    nothing_is_allowed(site, Rule.POLICY_FILE)
    assert "there is no " in caplog.text
    assert site.changes("")
    assert site.gate.ask(invitation()).is_allowed


def failing(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_what_cannot_be_written_down_is_not_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    entry = spooled(tmp_path)
    monkeypatch.setattr(os, "pwrite", failing(errno.EIO))
    assert site.gate.ask_upload(entry).rule is Rule.STATE
    decision = site.gate.admit(invitation(), version())
    assert decision == Decision(Outcome.WAITING, Rule.STATE, "this site cannot record its decisions")
    assert failure_of(decision) is FailureReason.POLICY_REFUSED


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_and_decisions_are_made_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    site = Site(tmp_path)
    entry = spooled(tmp_path)
    with monkeypatch.context() as on_the_full_disk:
        on_the_full_disk.setattr(os, "pwrite", failing(number))
        on_the_full_disk.setattr(tempfile, "TemporaryFile", failing(number))
        decision = site.gate.admit(invitation(), version())
        assert (decision.outcome, decision.rule) == (Outcome.WAITING, Rule.DISK_FULL)
        assert failure_of(decision) is FailureReason.DISK_FULL
        assert site.gate.ask_upload(entry).rule is Rule.DISK_FULL
        assert not site.gate.poll()
    assert [site.gate.poll(), site.gate.poll()] == [True, False], "said once"
    assert site.gate.admit(invitation(), version()).is_allowed
    assert not list(tmp_path.glob("tmp*"))


def test_a_history_that_finds_no_room_is_a_full_disk(tmp_path: Path) -> None:
    site = Site(tmp_path)
    database = site.gate._history.database
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own limit fails as a full disk does
    decisions = [
        site.gate.ask(invitation(1, local=json.dumps({"lr": "x" * 50_000, "n": number}))) for number in range(3)
    ]
    assert {decision.rule for decision in decisions} == {Rule.DISK_FULL}


def test_a_history_that_cannot_be_read_allows_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.gate.admit(invitation(), version())
    site.gate._history.close()
    nothing_is_allowed(site, Rule.STATE)
    (tmp_path / NAME).write_bytes(b"no database" * 1000)
    (tmp_path / f"{NAME}-wal").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=NAME):
        Site(tmp_path)


# ------------------------------------------------------------ secure sums

REQUIRED = "[secure]\nrequired = true\n"
EVERYTHING = 'metrics = "per_site"\nstatistics = "per_site"\nactions = ["*"]\n'


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (invitation(), "a training outside of a secure sum"),
        (question(), "an evaluation outside of a secure sum"),
        (survey(), "statistics of the data outside of a secure sum"),
        (invitation(message="train"), "a message outside of a secure sum"),
        (invitation(message="train", secure=terms_of()), "no place in a secure sum"),
        (invitation(codec="bf16", secure=terms_of()), "codec 'bf16' in a secure sum"),
        (invitation(secure=terms_of(members_max=3)), ""),
    ],
)
def test_a_site_that_demands_sums_refuses_all_else_and_logs_why(tmp_path: Path, asked: Any, said: str) -> None:
    site = Site(tmp_path, EVERYTHING + REQUIRED)
    decision = site.gate.ask(asked)
    if not said:
        assert decision.is_allowed
        return
    assert (decision.outcome, decision.rule) == (Outcome.REFUSED, Rule.SECURE)
    assert said in decision.detail
    assert failure_of(decision) is FailureReason.POLICY_REFUSED, "holds for the next invitation, too"
    assert site.lines()[-1]["outcome"] == f"secure: {decision.detail}"


def test_dishonest_moves_36_and_37_whatever_asks_for_more_than_sums_is_refused(tmp_path: Path) -> None:
    for seed in range(20):
        draw = random.Random(f"plain {seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        site, number = Site(folder, EVERYTHING + REQUIRED), draw.randint(1, 99)
        plain = replace(
            invitation(number, codec=draw.choice(["", "bf16"]), seed=draw.getrandbits(63)), local='{"lr": 0.1}'
        )
        moves = [
            plain,
            replace(plain, codec="", message=draw.choice(["train", "evaluate", "query.sum"])),
            replace(question(number), counted_round=RoundId(draw.randint(0, 9))),
            survey(number),
        ]
        draw.shuffle(moves)
        for move in moves:
            decision = site.gate.ask(move)
            assert (decision.outcome, decision.rule) == (Outcome.REFUSED, Rule.SECURE)
            assert "outside of a secure sum" in decision.detail
        assert len([line for line in site.lines() if line["outcome"].startswith("secure: ")]) == len(moves)
        assert site.gate.ask(invitation(number, secure=terms_of(members_max=3))).is_allowed


def test_a_plain_update_in_the_spool_does_not_leave_once_sums_are_demanded(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.gate.admit(invitation(), version())
    entry = spooled(tmp_path)
    assert site.changes(REQUIRED)
    assert (site.gate.ask_upload(entry).outcome, site.gate.ask_upload(entry).rule) == (Outcome.REFUSED, Rule.SECURE)
    site.gate.promises.begin(bytes(32))
    site.gate.promises.keep(promise_of(Kind_.JOINED, terms_of(run=RUN)))
    assert not site.gate.ask_upload(entry).is_allowed, "of the round of a sum, but not masked"


def test_a_masked_update_leaves_if_this_site_has_joined_its_sum(tmp_path: Path) -> None:
    site = Site(tmp_path, REQUIRED)
    assert site.gate.ask(invitation(secure=terms_of(run=RUN))).is_allowed
    entry = spooled(tmp_path, name=EXACT)
    assert not site.gate.ask_upload(entry).is_allowed
    site.gate.promises.begin(bytes(32))
    site.gate.promises.keep(promise_of(Kind_.JOINED, terms_of(run=RUN)))
    assert site.gate.ask_upload(entry).is_allowed
    assert not site.gate.ask_upload(spooled(tmp_path, 2, name=EXACT)).is_allowed


def test_another_session_of_an_approved_run_needs_no_second_word(tmp_path: Path, caplog: Any) -> None:
    site = Site(tmp_path, 'approval = "each_run"\n')
    with caplog.at_level("INFO"):
        assert site.gate.ask(invitation(secure=terms_of())).rule is Rule.APPROVAL
    assert (
        "in secure sums (at most 64 sites, threshold two_thirds, clip_norm 1, 32-bit words, weights of up to"
        in caplog.text
    )
    site.gate._history.decided(RUN, Standing.APPROVED, 1.0)
    for number, attempt in ((1, 1), (1, 2), (2, 1)):
        assert site.gate.ask(invitation(number, secure=terms_of(round=number, attempt=attempt))).is_allowed
    assert site.gate.ask(invitation(3)).rule is Rule.APPROVAL, "a plain training lets more leave"


def test_the_number_of_examples_is_told_as_the_policy_says(tmp_path: Path) -> None:
    site = Site(tmp_path)
    told = []
    for text in ("", "required = true", "tell_examples = false", "required = true\ntell_examples = true"):
        site.changes(f"[secure]\n{text}\n")
        assert site.gate.secure is not None
        told.append(site.gate.secure.tells_examples)
    assert told == [True, False, False, True]
