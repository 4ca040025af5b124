"""The alerts of a coordinator that hold now: Prometheus's rules on its records, and what it reports. Pure.

The rules are those of `docs/operations/rules.yml` with the same numbers, so that a person sees them without Prometheus.
The metrics of a process forget at its end; here the records count, so a mean is one over the rounds before, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.ground.printable import count_of, span
from atoll.protocol.identity.clock_hint import instant
from atoll.protocol.notices.notice import Condition, Notice
from atoll.protocol.vocabulary import Phase, RunState

STALLED_S, STALLED_ROUNDS, STALLED_FOR_S = 600.0, 3, 300.0
"""Of AtollRunStalled: seconds, and means of a round, without a commit; and the seconds for which that must last."""

ABANDONED, ABANDONED_WITHIN_S = 3, 3600.0
"""Of AtollRoundsAbandoned: the number of rounds, and the seconds in which they have ended."""

CERTIFICATE_S = 3 * 86_400.0
"""Of AtollCertificateEnds: the seconds until the end of a certificate."""

RULES_PAGE, NOTICES_PAGE = "docs/monitoring.md", "docs/on-call.md#conditions-of-a-coordinator"

ELSEWHERE = {
    "AtollJournalAway": "no view of that coordinator can be read then, and the answer says so",
    "AtollDiskFull": "the condition `disk` has the free bytes",
    "AtollRankAway": "`atoll rank list` asks the coordinator",
    "AtollAgentDisconnected": "the condition `away`, here and in the site's own state directory",
    "AtollSeriesDropped": "it is of the metrics alone",
}
"""Rules that are not evaluated here, with the place that has the same."""


@dataclass(frozen=True, slots=True)
class RunNow:
    """A run for the rules.

    Args:
        run_id: the run.
        state: its state.
        cause: the cause of its state.
        begun_at: the earliest begin of its first round [s since the epoch].
        rounds: the summaries of its newest ended rounds, ascending; None: it is not running, or is of messages.
    """

    run_id: str
    state: str
    cause: str
    begun_at: float
    rounds: Sequence[dict[str, Any]] | None = None


def alerts_of(
    runs: Sequence[RunNow],
    certificates: Sequence[tuple[str, float]],
    notices: Sequence[Notice],
    now: float,
    *,
    is_attended: bool,
) -> list[dict[str, Any]]:
    """Return the alerts that hold, the critical ones first: condition, subject, run, sentence, level, and docs.

    Args:
        runs: all runs.
        certificates: the processes with a certificate, each with its end [s since the epoch].
        notices: the conditions that the coordinator reports, as far as they last; its runs' states are told here.
        now: the time [s since the epoch].
        is_attended: whether a coordinator holds the state.
    """
    found = [
        *_of_rules(runs, certificates, now, is_attended=is_attended),
        *(_of_notice(each, runs) for each in notices),
    ]
    levels = ("critical", "error", "warning", "info")
    return sorted(found, key=lambda row: (levels.index(row["level"]), row["condition"], row["subject"]))


def _of_rules(
    runs: Sequence[RunNow], certificates: Sequence[tuple[str, float]], now: float, *, is_attended: bool
) -> Iterator[dict[str, Any]]:
    for run in runs:
        if run.state == RunState.FAILED:
            why = f": {run.cause}" if run.cause else ""
            yield _row("AtollRunFailed", "critical", run.run_id, f"{run.run_id} has failed{why}", run=run.run_id)
        if run.rounds is not None and is_attended:
            yield from _stalled(run, run.rounds, now)
            yield from _abandoned(run, run.rounds, now)
        if run.state == RunState.PAUSED:
            why = f": {run.cause}" if run.cause else ""
            said = f"run {run.run_id} is paused{why}"
            yield _row(Condition.RUN_PAUSED, "warning", run.run_id, said, run=run.run_id, docs=NOTICES_PAGE)
    waiting = [run.run_id for run in runs if run.state in (RunState.RUNNING, RunState.QUEUED)]
    if waiting and not is_attended:
        what = f"no coordinator holds this state, and {count_of(len(waiting), 'run waits', 'runs wait')} for one"
        yield _row("AtollNoCoordinator", "critical", waiting[0], f"{what}: {waiting[0]} first", run=waiting[0])
    for name, until in certificates if is_attended else ():
        if until - now < CERTIFICATE_S:
            ends = f"ends in {span(until - now)}, at" if until > now else "has ended at"
            yield _row("AtollCertificateEnds", "warning", name, f"the certificate of {name} {ends} {instant(until)}")


def _stalled(run: RunNow, rounds: Sequence[dict[str, Any]], now: float) -> Iterator[dict[str, Any]]:
    committed = [row["ended_at"] for row in rounds if row["phase"] == Phase.COMMITTED]
    seconds = [row["seconds"] for row in rounds if row.get("seconds") is not None]
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    since = now - max([run.begun_at, *filter(None, committed)])
    if since > STALLED_S + STALLED_ROUNDS * mean + STALLED_FOR_S:
        sentence = f"{run.run_id} has committed no round for {span(since)}"
        yield _row("AtollRunStalled", "warning", run.run_id, sentence, run=run.run_id)


def _abandoned(run: RunNow, rounds: Sequence[dict[str, Any]], now: float) -> Iterator[dict[str, Any]]:
    ends = [row["ended_at"] for row in rounds if row["phase"] == Phase.ABANDONED and row["ended_at"] is not None]
    if (num := sum(now - at <= ABANDONED_WITHIN_S for at in ends)) >= ABANDONED:
        sentence = f"{run.run_id}: {count_of(num, 'round was', 'rounds were')} abandoned within an hour"
        yield _row("AtollRoundsAbandoned", "warning", run.run_id, sentence, run=run.run_id)


def _of_notice(notice: Notice, runs: Sequence[RunNow]) -> dict[str, Any]:
    named, _, _ = notice.subject.partition(" at ")  # the approval of a site
    run_id = notice.run or (named if any(run.run_id == named for run in runs) else "")
    return _row(str(notice.condition), notice.level, notice.subject, notice.sentence, run=run_id, docs=NOTICES_PAGE)


def _row(condition: str, level: str, subject: str, sentence: str, *, run: str = "", docs: str = "") -> dict[str, Any]:
    row = {"condition": condition, "subject": subject, "run": run, "level": level, "sentence": sentence}
    return row | {"docs": docs or f"{RULES_PAGE}#{condition.lower()}"}
