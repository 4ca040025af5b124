"""The evaluation of a committed version by clients on their own data: requests, answers, end. Pure."""

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from atoll.aggregation.printable import count_of
from atoll.parallel.task.metrics import merge, only_finite
from atoll.protocol.disclosure import ANY_SUM, Disclosure, MetricsLeave
from atoll.protocol.vocabulary import ClientId, RoundId, Version
from atoll.server.rounds.events import AskEvaluation, ClientEvaluated, CloseEvaluation, Sums

IN_SUMS_ALONE = "its policy allows only sums over several sites"
"""The reason that a client's own metrics are not shown."""

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
    terms: dict[ClientId, Disclosure] = field(default_factory=dict)
    """The terms on which the answers may be shown; absent: `ANY_SUM`."""

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
            if event.disclosure != ANY_SUM:
                self.terms[event.client_id] = event.disclosure
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
        return CloseEvaluation(self.version, self.answers, self.failures, self.refused, self.terms)


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


def shown_sum(closed: CloseEvaluation) -> tuple[Sums | None, dict[ClientId, str], str]:
    """Return the sum of an evaluation that may be shown, the faults of answers outside it, and why there is no sum."""
    sums, odd = merged(closed.answers)
    num_clients = len(closed.answers) - len(odd)
    least = _min_sites(closed)
    if sums is not None and num_clients < least:
        have = count_of(num_clients, "site has", "sites have")
        return None, odd, f"{have} answered, and a site allows sums of at least {least}"
    return sums, odd, ""


def shown_alone(closed: CloseEvaluation) -> tuple[dict[ClientId, Sums], dict[ClientId, str]]:
    """Return the answers that may be shown for one client each, and the reason for each other client.

    Where few clients allow sums alone, the others' answers and the sum of all would tell theirs: with fewer of them
    than two, or than `min_sites`, no answer is shown alone.
    """
    reasons = {**closed.refused, **closed.failures}
    per_site = {client for client, terms in closed.terms.items() if terms.metrics is MetricsLeave.PER_SITE}
    in_sums_alone = closed.answers.keys() - per_site
    reasons |= dict.fromkeys(in_sums_alone, IN_SUMS_ALONE)
    if in_sums_alone and len(in_sums_alone) < max(2, _min_sites(closed)):
        few = count_of(len(in_sums_alone), "site")
        why = f"only sums are allowed by {few}, and the rest of the sum of all would be theirs"
        return {}, reasons | dict.fromkeys(per_site, why)
    return {client: only_finite(closed.answers[client]) for client in sorted(per_site)}, reasons


def _min_sites(closed: CloseEvaluation) -> int:
    """Return the least number of clients in a sum that may be shown: the largest that any of them asks for."""
    return max((terms.min_sites for client, terms in closed.terms.items() if client in closed.answers), default=0)


def clients_to_ask(connected: Iterable[ClientId], *, most: int, seed: int, version: Version) -> list[ClientId]:
    """Return all connected clients, or a pseudo-random choice of `most` > 0 by seed, version and names alone."""
    if not most:
        return sorted(connected)
    order = sorted(connected, key=lambda c: hashlib.sha256(f"{seed} {version} {c}".encode()).digest())
    return sorted(order[:most])
