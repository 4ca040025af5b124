"""The agent's own log of what its site's policy decided, written before anything else happens.

A hash chain as the coordinator's audit log (`protocol/chain`), which `atoll audit verify` reads:

    actor, role    the run that asked, "run"
    action         what was asked for and the answer: train.allowed, evaluate.waiting, upload.refused
    object         the round, or the version of an evaluation
    outcome        the rule's name, and a sentence
    digests        the task, the bytes of the update as far as they are known, and which work or update it is (SHA-256)

Between them stand the checkpoints of the coordinator's own audit log, as it has told them in signed messages.
"""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from atoll.client.policy.decide import Decision, Kind, PolicyRequest
from atoll.protocol.audit.chain import Checkpoint, Event, instant
from atoll.protocol.audit.files import AuditFiles

NAME = "decisions"
"""The folder of the log in the agent's directory."""

SIGN_S = 5.0
"""Seconds for which a decision may be signed by no checkpoint."""

REMEMBERED_MAX = 1000
"""Requests of which the last answer is remembered, so that the same one is not written again and again."""


class DecisionLog:
    """Appends to the log in an agent's directory; a line outlives the process before `write` returns.

    Raises:
        OSError: from every method: the log cannot be written.
    """

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        self._files = AuditFiles(folder / NAME, now, writer="agent")
        self._now, self._sign_by = now, 0.0
        self._told = ""
        self._answers: OrderedDict[tuple[PolicyRequest, int], Decision] = OrderedDict()

    def write(self, request: PolicyRequest, decision: Decision, turn: int = 0) -> None:
        """One decision; a repetition of the last one about the same request is no news.

        Args:
            request: what was wanted.
            decision: the answer.
            turn: how many times the round has been begun: what is begun once more is news.
        """
        if self._answers.get((request, turn)) == decision:
            return
        self._append(_event(self._now(), request, decision))
        self._answers[request, turn] = decision
        self._answers.move_to_end((request, turn))
        if len(self._answers) > REMEMBERED_MAX:
            self._answers.popitem(last=False)

    def told(self, checkpoint: str) -> None:
        """A checkpoint of the coordinator's audit log, `SEQ:DIGEST`; the same one again is no news, nor is none.

        Raises:
            ValueError: of another form.
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
        """Let a checkpoint follow what none signs, if that is for long enough; then it outlives the machine, too."""
        if self._files.unsigned and (at_once or self._now() >= self._sign_by):
            self._files.append([], sign=True)

    def close(self) -> None:
        """Sign the rest, and let go of the files."""
        try:
            self.sign(at_once=True)
        finally:
            self._files.close()


def _event(at: float, request: PolicyRequest, decision: Decision) -> Event:
    what = "version" if request.kind is Kind.EVALUATE else "round"
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
