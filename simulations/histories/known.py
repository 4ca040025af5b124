"""What a sampler may look at, by the events alone: a second reading of `membership`, `utility` and `pacer`."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.rounds.events import Candidate, Profile, Update

LOSS_MAX = 1e100
"""As `utility` says: no claim counts for more."""


@dataclass(slots=True)
class Known:
    """Of every client that has ever joined."""

    profiles: dict[ClientId, Profile] = field(default_factory=dict)
    chosen: Counter[ClientId] = field(default_factory=Counter)
    seconds: dict[ClientId, list[float]] = field(default_factory=dict)
    """Download, train and upload, averaged."""

    newest: dict[ClientId, RoundId] = field(default_factory=dict)
    told: dict[ClientId, tuple[float, float]] = field(default_factory=dict)
    """Loss and utility, by the newest update that told a loss when it came."""

    worth: list[float] = field(default_factory=list)
    """The mean utility of each commit's updates."""

    def accepted(self, update: Update) -> None:
        """An older update than the newest teaches nothing about its client."""
        client_id = update.client_id
        if update.round_id < self.newest.get(client_id, 0):
            return
        self.newest[client_id] = update.round_id
        if (loss := mean_loss(update)) is not None:
            self.told[client_id] = loss, utility(update)

    def measured(self, update: Update, upload: float) -> None:
        """Exponential averages with weight 1/2."""
        new = [update.download_seconds, update.train_seconds / update.work, upload]
        old = self.seconds.get(update.client_id, new)
        self.seconds[update.client_id] = [(a + b) / 2 for a, b in zip(old, new, strict=True)]

    def committed(self, updates: Sequence[Update]) -> None:
        """They make a version."""
        self.worth.append(math.fsum(map(utility, updates)) / len(updates))

    def relaxed(self, window: int) -> int:
        """How many windows of so many commits taught no more than the one before; 0 without a window."""
        if not window:
            return 0
        whole = range(0, len(self.worth) - window + 1, window)
        taught = [_sum(self.worth[begin : begin + window]) for begin in whole]
        return sum(now <= before for before, now in pairwise(taught))

    def candidates(self, clients: Iterable[ClientId]) -> tuple[Candidate, ...]:
        """In order of name."""
        return tuple(self._candidate(client_id) for client_id in sorted(clients))

    def _candidate(self, client_id: ClientId) -> Candidate:
        profile, (loss, worth) = self.profiles[client_id], self.told.get(client_id, (None, 0.0))
        seconds = sum(self.seconds[client_id]) if client_id in self.seconds else None
        newest = self.newest.get(client_id, RoundId(0))
        measured = Candidate(
            client_id, profile.num_examples, profile.label, loss, worth, seconds, newest, self.chosen[client_id]
        )
        return rounded(measured)


def rounded(candidate: Candidate) -> Candidate:
    """Its seconds to a millionth: two ways to an average need not end in the same bit."""
    seconds = candidate.seconds
    return candidate._replace(seconds=None if seconds is None else round(seconds, 6))


def mean_loss(update: Update) -> float | None:
    """Of the examples that it was trained with; None: it tells none."""
    return _mean(update, "loss")


def utility(update: Update) -> float:
    """Examples times the root of their losses' mean square, or the mean of the losses where no squares are told."""
    squared = _mean(update, "loss_squared")
    each = _mean(update, "loss") or 0.0 if squared is None else math.sqrt(max(squared, 0.0))
    return update.num_examples * max(each, 0.0)


def _mean(update: Update, name: str) -> float | None:
    if name not in update.statistics:
        return None
    total, number = update.statistics[name]
    return min(max(total / number, -LOSS_MAX), LOSS_MAX)


def _sum(values: Iterable[float]) -> float:
    """From left to right, as the pacer adds them: some windows differ in their last bit."""
    total = 0.0
    for value in values:
        total += value
    return total
