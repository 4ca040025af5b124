"""Oort's pacer: it counts the windows of commits whose utility did not grow. Pure.

    relaxed += 1    at the end of a window of W commits whose sum of U is no larger than the previous window's

Legend: U, the mean statistical utility of the updates in a commit (`oort_utility.utility_of`).
Each time, Oort waits for slower clients (`Oort.patience`): the fast ones have little left to contribute.

The pacer is part of the ledger and is fed only by commits. The members' records cannot give the utility of a window,
because they keep only a client's newest update.

Source:
    Lai et al., "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI 2021, Algorithm 1, the
    pacer; the mean instead of the sum is from the authors' code: rounds differ in how many report.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PACER_WINDOW = 20
"""Number of commits in a window, as in the paper."""


@dataclass(slots=True)
class Pacer:
    """Sums of utility of the current and of the last window, and the number of times that Oort was relaxed."""

    num_commits: int = 0  # commits in the current window
    utility: float = 0.0  # sum of the current window, so far
    before: float | None = None  # sum of the last window
    relaxed: int = 0

    def committed(self, utilities: Sequence[float], window: int) -> None:
        """Add a commit that used updates of these utilities (at least one); a window has `window` >= 1 commits."""
        self.num_commits += 1
        self.utility += math.fsum(utilities) / len(utilities)
        if self.num_commits < window:
            return
        self.relaxed += self.before is not None and self.utility <= self.before
        self.before, self.utility, self.num_commits = self.utility, 0.0, 0
