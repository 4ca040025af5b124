"""The verdict on a case: equal to the plain loop, or refused before the first step."""

import math
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.parallel import ranks
from tests.parallel.generated.answer import Answer
from tests.parallel.generated.strategies import Case
from tests.parallel.generated.training import expected_of, train_case

DIGITS = {"float64": 1e-9, "float32": 1e-4}
"""Largest difference of a loss and of a tensor, of values above 1 relative to them."""

OF_FILE = 2e-7
"""Least tolerance of a tensor, which is exported as float32."""

PATIENCE_S = 120.0
"""Longest wait for a case; GRACE_S for the other ranks once one has failed or refused: a stage waits for its peers."""
GRACE_S = 3.0


def verdict(case: Case, answers: list[Answer]) -> str:
    """Return "equal", "refused: ..." or what is wrong."""
    refused = [answer.text for answer in answers if answer.word == "refused"]
    if refused and not any(answer.word == "done" for answer in answers):
        return f"refused: {refused[0]}"  # a rank of another stage may only notice that a peer is gone
    failed = [(len(answer.text), rank, answer) for rank, answer in enumerate(answers) if answer.word != "done"]
    if failed:
        _, rank, answer = max(failed)  # the others may only have waited for it
        return f"rank {rank} {answer.word}: {answer.text}"
    first, expected = answers[0], expected_of(case)
    digits = DIGITS[case.model.dtype]
    if len(first.losses) != len(expected.losses):
        return f"{len(first.losses)} steps, right are {len(expected.losses)}"
    for step, (found, right) in enumerate(zip(first.losses, expected.losses, strict=True), 1):
        if not difference(found, right) <= digits:
            return f"the loss of step {step} is {found}, right is {right}"
    assert first.state is not None
    wanted = expected.trained if case.training.travels == "trained" else expected.state.keys()
    if not wanted <= first.state.keys() <= expected.state.keys():
        return f"other tensors: {sorted(first.state.keys() ^ expected.state.keys())}"
    for name, value in first.state.items():
        worst = difference(value, expected.state[name])
        if not worst <= max(digits, OF_FILE):
            return f"{name} differs by {worst:.1e}"
    return "equal"


def difference(found: Any, expected: Any) -> float:
    """Return the largest difference of two arrays, of values above 1 relative to them; inf if one is not a number."""
    scale = np.maximum(1.0, np.abs(expected))
    worst = np.max(np.abs(np.asarray(found, float) - expected) / scale, initial=0.0)
    return math.inf if math.isnan(worst) else float(worst)


def answers_of(case: Case) -> list[Answer]:
    """Train a case on the ranks; return the answer of each. One that waits for a rank that has ended says so."""
    with tempfile.TemporaryDirectory(prefix="atoll-generated-") as folder:
        outcomes = ranks.SHARED.call(
            train_case,
            case.ranks,
            case,
            Path(folder),
            timeout_s=PATIENCE_S,
            in_group=False,
            grace_s=GRACE_S,
            is_last=lambda answer: answer.word != "done",
        )
    return [each.value if each.is_good else Answer("failed", each.value) for each in outcomes]


@dataclass
class Tally:
    """The verdicts on many cases."""

    words: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def judge(self, case: Case) -> str:
        """Train a case, and count the verdict on it."""
        found = verdict(case, answers_of(case))
        word = found.partition(":")[0] if found.startswith(("equal", "refused")) else "WRONG"
        self.words[word] += 1
        if word == "refused":
            self.refusals[found[:160]] += 1
        return found

    @property
    def share_refused(self) -> float:
        """The share of the models that were refused."""
        return self.words["refused"] / max(1, self.words.total())

    def __str__(self) -> str:
        """Return the numbers of models, and of the refused ones."""
        words = self.words
        return f"{words.total()} models: {words['equal']} equal, {words['refused']} refused ({self.share_refused:.0%})"
