"""The sampler's view of the clients, derived from the events: a second reading of membership, utility and pacer."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.members.member import Candidate, Profile
from atoll.server.rounds.events import Update

LOSS_MAX = 1e100
"""Maximum loss that counts, as in `oort_utility`."""


@dataclass(slots=True)
class SamplerView:
    """The measurements of every client that has ever joined."""

    profiles: dict[ClientId, Profile] = field(default_factory=dict)
    chosen: Counter[ClientId] = field(default_factory=Counter)
    seconds: dict[ClientId, list[float]] = field(default_factory=dict)
    """Averages of download, training and upload [s]."""

    newest: dict[ClientId, RoundId] = field(default_factory=dict)
    losses: dict[ClientId, tuple[float, float]] = field(default_factory=dict)
    """Loss and utility of the newest update that reported a loss when it arrived."""

    worth: list[float] = field(default_factory=list)
    """Mean utility of each commit's updates."""

    def accepted(self, update: Update) -> None:
        """Take the loss of an accepted update, unless a newer one of its client has arrived."""
        client_id = update.client_id
        if update.round_id < self.newest.get(client_id, 0):
            return
        self.newest[client_id] = update.round_id
        if (loss := mean_loss(update)) is not None:
            self.losses[client_id] = loss, utility(update)

    def measured(self, update: Update, upload: float) -> None:
        """Update the exponential averages of durations, with weight 1/2."""
        new = [update.download_seconds, update.train_seconds / update.work, upload]
        old = self.seconds.get(update.client_id, new)
        self.seconds[update.client_id] = [(a + b) / 2 for a, b in zip(old, new, strict=True)]

    def committed(self, updates: Sequence[Update]) -> None:
        """Take the utility of the updates of a commit."""
        self.worth.append(math.fsum(map(utility, updates)) / len(updates))

    def relaxed(self, window: int) -> int:
        """Return the number of windows of commits without more utility than the window before; 0 without a window."""
        if not window:
            return 0
        begins = range(0, len(self.worth) - window + 1, window)
        utilities = [_sum(self.worth[begin : begin + window]) for begin in begins]
        return sum(now <= before for before, now in pairwise(utilities))

    def candidates(self, clients: Iterable[ClientId]) -> tuple[Candidate, ...]:
        """Return the candidates, in order of name."""
        return tuple(self._candidate(client_id) for client_id in sorted(clients))

    def _candidate(self, client_id: ClientId) -> Candidate:
        profile, (loss, worth) = self.profiles[client_id], self.losses.get(client_id, (None, 0.0))
        seconds = sum(self.seconds[client_id]) if client_id in self.seconds else None
        newest = self.newest.get(client_id, RoundId(0))
        measured = Candidate(
            client_id, profile.num_examples, profile.label, loss, worth, seconds, newest, self.chosen[client_id]
        )
        return rounded(measured)


def rounded(candidate: Candidate) -> Candidate:
    """Round the seconds to a millionth, because two computations of an average may differ in the last bit."""
    seconds = candidate.seconds
    return candidate._replace(seconds=None if seconds is None else round(seconds, 6))


def mean_loss(update: Update) -> float | None:
    """Return the mean loss of an update's training; None: it reports none."""
    return _mean(update, "loss")


def utility(update: Update) -> float:
    """Compute the examples times the root mean square of their losses, or times the mean loss without squares."""
    squared = _mean(update, "loss_squared")
    each = _mean(update, "loss") or 0.0 if squared is None else math.sqrt(max(squared, 0.0))
    return update.num_examples * max(each, 0.0)


def _mean(update: Update, name: str) -> float | None:
    if name not in update.statistics:
        return None
    total, number = update.statistics[name]
    return min(max(total / number, -LOSS_MAX), LOSS_MAX)


def _sum(values: Iterable[float]) -> float:
    """Add from left to right, as the pacer does, because another order may change the last bit."""
    total = 0.0
    for value in values:
        total += value
    return total
