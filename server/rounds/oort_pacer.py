"""How much the rounds still teach, window by window, and how often that became less. Pure.

    relaxed += 1    at the end of a window of W commits whose sum of U is no larger than that of the window before

Legend: U, the mean statistical utility of the updates that are in a commit (`utility.utility_of`).
Oort waits for slower clients each time (`Oort.patience`): the fast ones have little left to teach.

It lies in the ledger, and is fed by commits alone: no client's own history says what a window was worth, because that
keeps only the newest of a client's updates.

Source:
    Lai et al., "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI 2021, Algorithm 1, the
    pacer; the mean in the place of the sum is that of the authors' code: rounds differ in how many report.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PACER_WINDOW = 20
"""Commits in a window, as in the paper."""


@dataclass(slots=True)
class Pacer:
    """The two windows that are compared, as sums."""

    num_commits: int = 0  # in this window
    utility: float = 0.0  # of this window, so far
    before: float | None = None  # of the last one
    relaxed: int = 0

    def committed(self, utilities: Sequence[float], window: int) -> None:
        """A round used updates of these utilities (at least one); a window has `window` >= 1 rounds."""
        self.num_commits += 1
        self.utility += math.fsum(utilities) / len(utilities)
        if self.num_commits < window:
            return
        self.relaxed += self.before is not None and self.utility <= self.before
        self.before, self.utility, self.num_commits = self.utility, 0.0, 0
