"""The history for a site's policy: the runs that have asked, the rounds that have begun, and accepted rollbacks.

A round has one row for each time that it was counted. The row is open until an update of the round is sent: repeating
the same work continues the open row, so a client that reconnects or restarts is not counted again.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path

from atoll.client.policy.database import BUSY_S, NAME, HistoryUnusable, PolicyDatabase
from atoll.client.policy.decide import COUNTED, History, Kind, PolicyRequest, Standing

__all__ = [
    "BUSY_S",
    "NAME",
    "RUNS_MAX",
    "DecidedMeanwhile",
    "HistoryUnusable",
    "NoSuchRun",
    "OtherTerms",
    "PolicyHistory",
    "RunTerms",
]

RUNS_MAX = 1000
"""Number of undecided runs that are remembered; the oldest beyond it are forgotten."""

ROUNDS_DAYS = 31
"""Days for which round counts are kept: a round that is requested later counts as a new one."""

FINGERPRINT_LETTERS = 24
"""Hexadecimal digits of the fingerprint of a run's terms."""

_MASKED = "masked"
"""Name under which the masked update of a round is sent."""


class NoSuchRun(LookupError):
    """Error: the run has never asked here."""


class OtherTerms(LookupError):
    """Error: the run's terms have changed since the operator looked at them."""


class DecidedMeanwhile(LookupError):
    """Error: the run was decided about since the operator looked at it.

    Args:
        terms: the run as it is now.
    """

    def __init__(self, terms: "RunTerms") -> None:
        super().__init__(terms.run_id)
        self.terms = terms


@dataclass(frozen=True, slots=True)
class RunTerms:
    """A run that has asked, and the terms that an approval covers."""

    run_id: str
    task: str
    local: str
    """Settings of the training, JSON."""
    standing: Standing
    asked_at: float
    decided_at: float | None
    algorithm: str
    """Algorithm of the training; empty: the run has only asked for evaluations."""
    codec: str
    """Codec of the updates; empty: plain."""
    metrics: str
    """Form in which the site's metrics leave the site."""
    secure: str = ""
    """Digest of the terms of its secure sums (`Terms.approved`); empty: its results leave plain."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the terms: a SHA-256 cut to 96 bits, too long to find other terms with the same one."""
        fields = [self.task, self.local, self.algorithm, self.codec, self.metrics]
        terms = json.dumps([*fields, self.secure] if self.secure else fields)  # plain: as before there were secure sums
        return hashlib.sha256(terms.encode()).hexdigest()[:FINGERPRINT_LETTERS]


class PolicyHistory:
    """History of one site, an open file that is created if it is missing.

    Args:
        folder: the agent's state directory.
        read_only: whether the file is only read, and must exist.

    Raises:
        HistoryUnusable: from every method, when the file cannot be used.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self.database, self._day = PolicyDatabase(folder, read_only=read_only), ""

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.database.path

    def close(self) -> None:
        """Close the database of the history."""
        self.database.close()

    @property
    def change(self) -> int:
        """Number that changes whenever another process has written to the file."""
        return self.database.change

    # ------------------------------------------------------------ for a decision

    def of(self, request: PolicyRequest, *, day: str) -> History:
        """Return the part of the history that a decision about a request needs, on the given day."""
        with self.database.faults():
            terms = self._run(request.run_id)
            (today,) = self.database.execute("SELECT count(*) FROM rounds WHERE day = ?", (day,)).fetchone()
            counts = self._counts(request)
        standing = Standing.UNDECIDED if terms is None else terms.standing
        if standing is Standing.APPROVED and not (terms is not None and _covers(terms, request)):
            standing = Standing.UNDECIDED
        is_counted = any(_continues(count, request, day) for count in counts)
        turn = len(counts) + (not is_counted) if request.kind in COUNTED else 0
        fingerprint = "" if terms is None else terms.fingerprint
        return History(standing=standing, rounds_today=today, is_counted=is_counted, turn=turn, terms=fingerprint)

    def asked(self, request: PolicyRequest, at: float) -> bool:
        """Record the terms on which a run asks; return whether the run or its terms are new.

        New terms end an approval; a rejected run stays rejected.

        Args:
            request: a request to train; or to evaluate or for statistics, where algorithm and codec do not matter.
            at: seconds since the epoch.
        """
        run_id, local = request.run_id, request.local or ""
        with self.database.faults(), self.database.transaction():
            terms = self._run(run_id)
            if terms is not None and _has_terms(terms, request, local):
                return False
            standing = terms.standing if terms is not None else Standing.UNDECIDED
            if standing is Standing.APPROVED:
                standing = Standing.UNDECIDED
            decided_at = None if terms is None else terms.decided_at
            asked = (request.algorithm or "", request.codec or "", request.metrics, request.secure)
            row = (run_id, request.task, local, standing, at, decided_at, *asked)
            self.database.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self.database.execute(
                "DELETE FROM runs WHERE run_id IN (SELECT run_id FROM runs WHERE standing = ? ORDER BY asked_at DESC "
                "LIMIT -1 OFFSET ?)",
                (Standing.UNDECIDED, RUNS_MAX),
            )
            return True

    def count(self, request: PolicyRequest, day: str) -> None:
        """Count a training or an upload, unless it continues a counted round.

        An update closes its round: every later training for that round counts.
        """
        with self.database.faults(), self.database.transaction():
            self._forget_rounds(day)
            if not any(_continues(count, request, day) for count in self._counts(request)):
                work = "" if request.kind is Kind.UPLOAD else request.content
                row = (request.run_id, request.number, work, day, None)
                self.database.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?)", row)
            if request.kind is Kind.UPLOAD:
                self.database.execute(
                    "UPDATE rounds SET sent = ? WHERE run_id = ? AND round_id = ? AND sent IS NULL",
                    (_sent(request), request.run_id, request.number),
                )

    def task_of(self, run_id: str) -> str:
        """Return the task that a run has asked for; empty if it has never asked."""
        with self.database.faults():
            terms = self._run(run_id)
        return "" if terms is None else terms.task

    # ------------------------------------------------------------ for the operator

    def runs(self) -> list[RunTerms]:
        """Return all runs that have asked, oldest request first."""
        with self.database.faults():
            rows = self.database.execute("SELECT * FROM runs ORDER BY asked_at, run_id").fetchall()
        return [_terms(row) for row in rows]

    def decided(
        self, run_id: str, standing: Standing, at: float, *, fingerprint: str = "", seen: Standing | None = None
    ) -> RunTerms:
        """Approve or reject a run, on its latest terms.

        Args:
            run_id: id of the run.
            standing: the operator's decision.
            at: seconds since the epoch.
            fingerprint: the fingerprint of the terms that the operator saw; empty: any.
            seen: the decision that the operator saw; None: any.

        Raises:
            NoSuchRun: the run has never asked.
            OtherTerms: the run's terms differ from the fingerprint's.
            DecidedMeanwhile: the run's standing differs from `seen`.
        """
        with self.database.faults(), self.database.transaction():
            terms = self._run(run_id)
            if terms is None:
                raise NoSuchRun(run_id)
            if fingerprint not in ("", terms.fingerprint):
                raise OtherTerms(run_id)
            if seen not in (None, terms.standing):
                raise DecidedMeanwhile(terms)
            change = "UPDATE runs SET standing = ?, decided_at = ? WHERE run_id = ?"
            self.database.execute(change, (standing, at, run_id))
            return replace(terms, standing=standing, decided_at=at)

    def forget(self, run_id: str) -> None:
        """Forget a run, so that its next request counts as its first; its rounds remain counted.

        Raises:
            NoSuchRun: the run has never asked.
        """
        with self.database.faults(), self.database.transaction():
            if self.database.execute("DELETE FROM runs WHERE run_id = ?", (run_id,)).rowcount == 0:
                raise NoSuchRun(run_id)

    def accept_rollback(self, run_id: str, at: float) -> None:
        """Ask the running agent to accept a rollback of a run."""
        with self.database.faults():
            self.database.execute("INSERT OR REPLACE INTO rollbacks VALUES (?, ?)", (run_id, at))

    def accepted_rollbacks(self) -> list[str]:
        """Return the runs whose rollback the operator accepts and no agent has used."""
        with self.database.faults():
            return [run_id for (run_id,) in self.database.execute("SELECT run_id FROM rollbacks ORDER BY run_id")]

    def taken(self, run_id: str) -> None:
        """Record that the agent has used an accepted rollback."""
        with self.database.faults():
            self.database.execute("DELETE FROM rollbacks WHERE run_id = ?", (run_id,))

    # ------------------------------------------------------------ the file

    def _forget_rounds(self, day: str) -> None:
        """Delete the rows of long past days, once a day."""
        if day != self._day:
            oldest = date.fromisoformat(day) - timedelta(days=ROUNDS_DAYS)
            self.database.execute("DELETE FROM rounds WHERE day < ?", (oldest.isoformat(),))
            self._day = day

    def _counts(self, request: PolicyRequest) -> list["_Count"]:
        """Return the stored rows of a request's round, one for each time that the policy's limit counted the round."""
        if request.kind not in COUNTED:
            return []
        query = "SELECT work, day, sent FROM rounds WHERE run_id = ? AND round_id = ?"
        return [_Count(*row) for row in self.database.execute(query, (request.run_id, request.number))]

    def _run(self, run_id: str) -> RunTerms | None:
        row = self.database.execute("SELECT * FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        return None if row is None else _terms(row)


@dataclass(frozen=True, slots=True)
class _Count:
    """Row of `rounds`: one counted beginning of a round."""

    work: str
    """Content of the training; empty: the round was counted with its update, or by an older Atoll."""
    day: str
    sent: str | None
    """Digest of the update that may be sent; None: the row is open."""


def _continues(count: _Count, request: PolicyRequest, day: str) -> bool:
    """Return whether a request continues the round of this row."""
    if request.kind is Kind.UPLOAD:
        return count.sent in (None, _sent(request))
    return count.sent is None and (count.work, count.day) == (request.content, day)


def _sent(request: PolicyRequest) -> str:
    """Return the name of an update by which its repetition is known; all attempts at one secure sum are one update."""
    return _MASKED if request.is_masked else request.content


def _covers(terms: RunTerms, request: PolicyRequest) -> bool:
    """Return whether an approval of these terms covers a request; an upload is covered if its training was."""
    return _has_terms(terms, request, terms.local if request.local is None else request.local)


def _has_terms(terms: RunTerms, request: PolicyRequest, local: str) -> bool:
    if (terms.task, terms.local) != (request.task, local):
        return False
    if request.kind is Kind.UPLOAD:
        return True
    if terms.metrics != request.metrics:
        return False
    if request.algorithm is None and terms.algorithm:  # an evaluation by a run that trains here, whose sums it covers
        return bool(terms.secure) == bool(request.secure)
    algorithm, codec = request.algorithm or "", request.codec or ""
    return terms.secure == request.secure and (terms.algorithm, terms.codec) == (algorithm, codec)


def _terms(row: tuple[str, str, str, str, float, float | None, str, str, str, str]) -> RunTerms:
    run_id, task, local, standing, asked_at, decided_at, *terms = row
    return RunTerms(run_id, task, local, Standing(standing), asked_at, decided_at, *terms)
