"""The agent's log of its site's policy decisions, written ahead of their effects.

A hash chain like the coordinator's audit log (`protocol/audit/chain`), which `atoll audit verify` reads:

    actor, role    the run that asked, "run"
    action         the kind of the request and the outcome: train.allowed, evaluate.waiting, upload.refused
    object         the round, the version of an evaluation, or the request for statistics
    outcome        the rule's name, and a sentence
    digests        the task, the size of the update if it is known, and the SHA-256 of the work or the update

The log also holds a line for each session of a secure sum that the site has joined or signed, and for each check of a
session that failed (`secure.joined`, `secure.signed`, `secure.left`); a line for each charge to a data set with a
budget (`privacy.charge`); and checkpoints of the coordinator's audit log,
taken from its signed messages.
"""

from collections.abc import Callable
from pathlib import Path

from atoll.client.policy.decide import Decision, Kind, PolicyRequest
from atoll.client.secure.promises import Promise
from atoll.ground.bounded_mapping import BoundedMapping
from atoll.protocol.audit.chain import Checkpoint, Event, instant
from atoll.protocol.audit.files import AuditFiles
from atoll.protocol.secure.terms import Terms

CHARGED = "privacy.charge"
"""Action of a charge to a data set with a budget."""

NAME = "decisions"
"""Folder of the log in the agent's state directory."""

SIGN_S = 5.0
"""Longest time until a checkpoint signs a decision [s]."""

REMEMBERED_MAX = 1000
"""Number of requests whose last decision is remembered, so that a repetition is not written again."""


def charges_in_log(folder: Path) -> bool:
    """Return whether the log of a state directory has a charge; reads all of it.

    Raises:
        OSError: it cannot be read.
    """
    needle = f'"{CHARGED}"'.encode()
    return any(needle in path.read_bytes() for path in sorted((folder / NAME).glob("*.jsonl")))


class DecisionLog:
    """Log of decisions in an agent's state directory; a line survives a crash of the process once `write` returns.

    Args:
        folder: the state directory.
        now: returns seconds since the epoch.

    Raises:
        OSError: from every method, when the log cannot be written.
    """

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        self._files = AuditFiles(folder / NAME, now, writer="agent")
        self._now, self._sign_by = now, 0.0
        self._told = ""
        self._answers: BoundedMapping[tuple[PolicyRequest, int], Decision] = BoundedMapping(REMEMBERED_MAX)

    @property
    def damage(self) -> str:
        """Description of a broken chain that this process has found; empty: none."""
        return self._files.damage

    def write(self, request: PolicyRequest, decision: Decision, turn: int = 0) -> None:
        """Write a decision, unless it repeats the last one about the same request and turn.

        Args:
            request: the request.
            decision: the answer.
            turn: number of times that the round has begun.
        """
        if self._answers.get((request, turn)) == decision:
            return
        self._append(_event(self._now(), request, decision))
        self._answers[request, turn] = decision

    def note_session(self, of: Terms | Promise, action: str, outcome: str) -> None:
        """Write a line about a session of a secure sum: joined, signed, opened, or left for a failed check.

        Args:
            of: terms of the session, or a promise in it.
            action: of this site, such as `secure.joined`.
            outcome: the sentence.
        """
        where = f"round {of.round}, attempt {of.attempt}, session {of.session}"
        if of.purpose != "update":
            where = f"{of.purpose}, {where}"
        if isinstance(of, Promise):
            digests = {"base": of.base} | ({"survivors": of.survivors} if of.survivors else {})
        else:
            digests = {"task": of.task, "base": of.model, "terms": of.digest.hex()}
        self._append(Event(instant(self._now()), of.run, "run", action, where, outcome, digests))

    def note_charge(self, request: PolicyRequest, outcome: str) -> None:
        """Write a line about a charge to a data set with a budget, which is durable already.

        Args:
            request: the training, or the update, that is charged.
            outcome: the sentence.
        """
        digests = {"task": request.task} | ({"work": request.content} if request.content else {})
        at, where = instant(self._now()), f"round {request.number}"
        self._append(Event(at, request.run_id, "run", CHARGED, where, outcome, digests))

    def note_checkpoint(self, checkpoint: str) -> None:
        """Write a new checkpoint of the coordinator's audit log, `SEQ:DIGEST`; an empty or repeated one is skipped.

        Raises:
            ValueError: the checkpoint has another form.
        """
        if not checkpoint or checkpoint == self._told:
            return
        line = Checkpoint.parse(checkpoint).seq
        at = instant(self._now())
        self._append(Event(at, "coordinator", "coordinator", "audit.checkpoint", f"line {line}", checkpoint))
        self._told = checkpoint

    def _append(self, event: Event) -> None:
        if not self._files.unsigned:
            self._sign_by = self._now() + SIGN_S
        self._files.append([event])

    def sign(self, *, at_once: bool = False) -> None:
        """Sign the newest decisions once `SIGN_S` is over, or at once; signed ones also survive a power failure."""
        if self._files.unsigned and (at_once or self._now() >= self._sign_by):
            self._files.append([], sign=True)

    def close(self) -> None:
        """Sign the newest decisions and close the files."""
        try:
            self.sign(at_once=True)
        finally:
            self._files.close()


def _event(at: float, request: PolicyRequest, decision: Decision) -> Event:
    what = {Kind.EVALUATE: "version", Kind.STATISTICS: "request"}.get(request.kind, "round")
    size = {} if request.num_bytes is None else {"bytes": str(request.num_bytes)}
    content = {"update" if request.kind is Kind.UPLOAD else "work": request.content} if request.content else {}
    return Event(
        time=instant(at),
        actor=request.run_id,
        role="run",
        action=f"{request.kind}.{decision.outcome}",
        object=f"{what} {request.number}",
        outcome=f"{decision.rule}: {decision.detail}" if decision.detail else decision.rule,
        digests={"task": request.task, **size, **content},
    )
