"""The evaluation of a committed version by clients on their own data: requests, answers, end. Pure."""

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from atoll.aggregation.printable import count_of
from atoll.parallel.task.metrics import merge, only_finite
from atoll.protocol.vocabulary import ClientId, RoundId, Version
from atoll.server.rounds.events import AskEvaluation, ClientEvaluated, CloseEvaluation, Sums

SILENT = "did not answer in time"
"""The failure of a client whose answer has not come by the deadline."""


@dataclass(slots=True)
class ClientEvaluation:
    """The evaluation of one version. The next round opens after its end."""

    version: Version
    deadline: float
    asked: list[ClientId]  # sorted
    answers: dict[ClientId, Sums] = field(default_factory=dict)
    failures: dict[ClientId, str] = field(default_factory=dict)
    refused: dict[ClientId, str] = field(default_factory=dict)
    """The reasons why some sums of an answer are left out."""

    @property
    def is_complete(self) -> bool:
        """Return whether every requested client has answered or failed."""
        return len(self.answers) + len(self.failures) >= len(self.asked)

    def is_waiting_for(self, client_id: ClientId) -> bool:
        """Return whether the client's answer is awaited: it was requested, and is neither in nor failed."""
        at = bisect_left(self.asked, client_id)
        was_asked = at < len(self.asked) and self.asked[at] == client_id
        return was_asked and client_id not in self.answers and client_id not in self.failures

    def ask(self, client_id: ClientId, counted_round: RoundId) -> AskEvaluation:
        """Return the request to a client, for the first time and after each reconnection."""
        return AskEvaluation(client_id, self.version, self.deadline, counted_round)

    def answered(self, event: ClientEvaluated) -> None:
        """Record a client's sums, or the reason why it has none."""
        if event.version != self.version or not self.is_waiting_for(event.client_id):
            return
        if event.statistics is None:
            self.failures[event.client_id] = event.detail
        else:
            self.answers[event.client_id] = event.statistics
            if event.detail:
                self.refused[event.client_id] = event.detail

    def lost(self, client_id: ClientId, reason: str) -> None:
        """Record the loss of a client as its failure."""
        if self.is_waiting_for(client_id):
            self.failures[client_id] = f"lost: {reason}"

    def close(self) -> CloseEvaluation:
        """End the evaluation; a client without an answer has failed."""
        for client_id in self.asked:
            if self.is_waiting_for(client_id):
                self.failures[client_id] = SILENT
        return CloseEvaluation(self.version, self.answers, self.failures, self.refused)


def addable(answers: Mapping[ClientId, Sums]) -> tuple[dict[ClientId, Sums], dict[ClientId, str]]:
    """Split the answers into those that can be added up and the others, each with the fault.

    All sums of a metric must have the same length; the commonest one is taken as right, of equally common ones the
    least. Empty sums were refused (`metrics.only_finite`): the others of their client count.
    """
    lengths: dict[str, Counter[int]] = {}
    for sums in answers.values():
        for name, numbers in sums.items():
            if numbers:
                lengths.setdefault(name, Counter())[len(numbers)] += 1
    usual = {name: min(counts, key=lambda length: (-counts[length], length)) for name, counts in lengths.items()}
    odd = {
        client: f"{count_of(len(numbers), 'sum')} of {name[:100]!r}, not {usual[name]} as the others"
        for client, sums in answers.items()
        for name, numbers in sums.items()
        if numbers and len(numbers) != usual[name]
    }
    return {client: sums for client, sums in answers.items() if client not in odd}, odd


def merged(answers: Mapping[ClientId, Sums]) -> tuple[Sums | None, dict[ClientId, str]]:
    """Return the sums of all answers that can be added up (None: there are none), and the faults of the others."""
    added, odd = addable({client: only_finite(sums) for client, sums in answers.items()})
    return (only_finite(merge(added.values())) if added else None), odd


def clients_to_ask(connected: Iterable[ClientId], *, most: int, seed: int, version: Version) -> list[ClientId]:
    """Return all connected clients, or a pseudo-random choice of `most` > 0 by seed, version and names alone."""
    if not most:
        return sorted(connected)
    order = sorted(connected, key=lambda c: hashlib.sha256(f"{seed} {version} {c}".encode()).digest())
    return sorted(order[:most])
