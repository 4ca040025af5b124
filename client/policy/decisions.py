"""The agent's own log of what its site's policy decided: JSON lines, written before anything else happens."""

import json
import os
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path

from atoll.client.policy.decide import Decision, PolicyRequest

NAME = "decisions.jsonl"
REMEMBERED_MAX = 1000
"""Requests of which the last answer is remembered, so that the same one is not written again and again."""


class DecisionLog:
    """Appends to one file; a line is the operating system's before `write` returns.

    Raises:
        OSError: from every method: the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._answers: OrderedDict[PolicyRequest, Decision] = OrderedDict()

    def write(self, at: float, request: PolicyRequest, decision: Decision) -> None:
        """One decision; a repetition of the last one about the same request is no news."""
        if self._answers.get(request) == decision:
            return
        line = {
            "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
            "decision": decision.outcome,
            "rule": decision.rule,
            "kind": request.kind,
            "run": request.run_id,
            "task": request.task,
            "version" if request.kind == "evaluate" else "round": request.number,
            "bytes": request.num_bytes,
            "detail": decision.detail,
        }
        data = json.dumps(line, ensure_ascii=True).encode() + b"\n"
        if os.write(self._fd, data) != len(data):
            raise OSError("the decision could not be written whole")
        self._answers[request] = decision
        self._answers.move_to_end(request)
        if len(self._answers) > REMEMBERED_MAX:
            self._answers.popitem(last=False)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)
