"""The evaluation of a committed version by clients on their data: requests, answers, end. Pure."""

import hashlib
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.aggregation.fold.weights import weight_cap
from atoll.ground.printable import count_of
from atoll.protocol.disclosure import ANY_SUM, Disclosure, MetricsLeave
from atoll.protocol.vocabulary import ClientId, RoundId, Version
from atoll.server.rounds.events import AskEvaluation, ClientEvaluated, CloseEvaluation, Sums
from atoll.task.metrics import merge, merge_alike, only_finite, usual_lengths

IN_SUMS_ALONE = "its policy allows only sums over several sites"
"""Reason why a client's metrics are not shown individually."""

NO_SUMS = "it measured nothing"
"""Reason shown for a client whose answer has no finite sum: it does not count as evaluated."""

SILENT = "did not answer in time"
"""Failure of a client that has not answered by the deadline."""


@dataclass(slots=True)
class ClientEvaluation:
    """Evaluation of one version. The next round opens after its end."""

    version: Version
    deadline: float
    asked: list[ClientId]  # sorted
    answers: dict[ClientId, Sums] = field(default_factory=dict)
    failures: dict[ClientId, str] = field(default_factory=dict)
    refused: dict[ClientId, str] = field(default_factory=dict)
    """Reasons why some sums of an answer are omitted."""
    terms: dict[ClientId, Disclosure] = field(default_factory=dict)
    """Terms on which the answers may be shown; absent: `ANY_SUM`."""
    asked_at: float = 0.0
    """Instant at which the evaluation began."""

    @property
    def is_complete(self) -> bool:
        """Return whether every requested client has answered or failed."""
        return len(self.answers) + len(self.failures) >= len(self.asked)

    def is_waiting_for(self, client_id: ClientId) -> bool:
        """Return whether the client's answer is awaited: it was requested, and has neither arrived nor failed."""
        at = bisect_left(self.asked, client_id)
        was_asked = at < len(self.asked) and self.asked[at] == client_id
        return was_asked and client_id not in self.answers and client_id not in self.failures

    def ask(self, client_id: ClientId, counted_round: RoundId) -> AskEvaluation:
        """Return the request to a client, for the first time and after each reconnection."""
        return AskEvaluation(client_id, self.version, self.deadline, counted_round, self.asked_at)

    def answered(self, event: ClientEvaluated, most: float = math.inf, why: Callable[[], str] = str) -> None:
        """Record a client's sums, or the reason why it has none.

        A metric of two sums whose count is above `most` is omitted, with `why()` at the end of the reason.
        """
        if event.version != self.version or not self.is_waiting_for(event.client_id):
            return
        if event.statistics is None:
            self.failures[event.client_id] = event.detail
            return
        sums, detail = dict(event.statistics), event.detail
        for name, numbers in event.statistics.items():
            if len(numbers) == 2 and abs(numbers[1]) > most:
                fault = f"metric {name[:100]!r}: a count of {numbers[1]:.6g} is above {most:.6g}{why()}"
                sums[name], detail = (), f"{detail}; {fault}" if detail else fault
        self.answers[event.client_id] = sums
        if event.disclosure != ANY_SUM:
            self.terms[event.client_id] = event.disclosure
        if sums and not any(sums.values()):
            detail = detail or NO_SUMS
        if detail:
            self.refused[event.client_id] = detail

    def lost(self, client_id: ClientId, reason: str) -> None:
        """Record the loss of a client as its failure."""
        if self.is_waiting_for(client_id):
            self.failures[client_id] = f"lost: {reason}"

    def close(self, max_share: float = 1.0) -> CloseEvaluation:
        """End the evaluation; a client without an answer has failed.

        Args:
            max_share: largest share of one client in each metric.
        """
        for client_id in self.asked:
            if self.is_waiting_for(client_id):
                self.failures[client_id] = SILENT
        return CloseEvaluation(self.version, self.answers, self.failures, self.refused, self.terms, max_share)


@dataclass(frozen=True, slots=True)
class Merged:
    """Sum of the answers of an evaluation, each metric over the clients whose sums can be added."""

    sums: Sums | None
    """The sums by metric, or None."""
    left_out: dict[ClientId, str]
    """The clients missing in the sum of some metric, with the reason; their other metrics are included."""
    num_clients: int
    """The number of clients with a metric in the sum."""
    capped: dict[ClientId, str] = field(default_factory=dict)
    """The clients whose weight in some metric is reduced, with the reason."""

    @property
    def said(self) -> list[tuple[ClientId, str]]:
        """The clients missing in a sum and those with a reduced weight, each with the reason."""
        return [*self.left_out.items(), *self.capped.items()]


def merged(answers: Mapping[ClientId, Sums], *, least: int = 0, max_share: float = 1.0) -> Merged:
    """Return the sum of the answers, each metric over the clients with its usual number of sums (`usual_lengths`).

    Empty sums were refused (`metrics.sound`). A metric over fewer than `least` clients has empty sums. No client has
    more than `max_share` of a metric (`StragglerPolicy.max_share`).
    """
    if max_share == 1 and len(answers) >= least and (alike := merge_alike(answers.values())) is not None:
        return Merged(alike, {}, len(answers))
    finite = {client: only_finite(sums) for client, sums in answers.items()}
    usual, left_out, kept = usual_lengths(finite.values()), dict[ClientId, str](), dict[ClientId, Sums]()
    for client, sums in finite.items():
        odd = {name: numbers for name, numbers in sums.items() if numbers and len(numbers) != usual[name]}
        if odd:
            left_out[client] = "; ".join(
                f"metric {name[:100]!r}: {count_of(len(numbers), 'sum')}, not {usual[name]} like the others"
                for name, numbers in odd.items()
            )
        kept[client] = {name: numbers for name, numbers in sums.items() if numbers and name not in odd}
    capped = _cap(kept, max_share) if max_share < 1 else {}
    of_metric = Counter(name for sums in kept.values() for name in sums)
    hidden = {name for name, count in of_metric.items() if count < least}
    counted = [client for client, sums in kept.items() if sums.keys() - hidden or not answers[client]]
    if not counted and (least or not answers):
        return Merged(None, left_out, 0)
    empty = {name: () for sums in finite.values() for name in sums}
    found = only_finite(merge(kept[client] for client in counted))
    return Merged(empty | {n: s for n, s in found.items() if n not in hidden}, left_out, len(counted), capped)


def _cap(kept: dict[ClientId, Sums], max_share: float) -> dict[ClientId, str]:
    """Reduce the sums of clients with too large a share of a metric, in place; return the reasons."""
    reasons = dict[ClientId, str]()
    for name in sorted({name for sums in kept.values() for name in sums}):
        weights = {client: weight for client, sums in kept.items() if name in sums and (weight := _weight(sums[name]))}
        if (cap := weight_cap([*weights.values()], max_share)) is None:
            continue
        for client, weight in weights.items():
            if weight > cap:
                kept[client] = {**kept[client], name: tuple(cap / weight * number for number in kept[client][name])}
                why = f"metric {name[:100]!r}: its weight {weight:.6g} counts as {cap:.6g} (max_share {max_share:g})"
                reasons[client] = "; ".join(filter(None, (reasons.get(client, ""), why)))
    return reasons


def _weight(sums: Sequence[float]) -> float:
    """Return the weight of a client in a metric: its count, or, unless there are two sums, their magnitudes' sum."""
    return abs(sums[1]) if len(sums) == 2 else math.fsum(map(abs, sums))


def shown_sum(closed: CloseEvaluation) -> tuple[Merged, str]:
    """Return the sum of an evaluation that may be shown, and why there is none."""
    if closed.summed:
        return Merged(closed.sums, {}, len(closed.summed)), ""
    least = _min_sites(closed)
    found = merged(closed.answers, least=least, max_share=closed.max_share)
    if found.sums is None and closed.answers and least:
        have = count_of(len(closed.answers), "site has", "sites have")
        return found, f"{have} answered, and a site allows sums of at least {least}"
    return found, ""


def shown_alone(closed: CloseEvaluation) -> tuple[dict[ClientId, Sums], dict[ClientId, str]]:
    """Return the answers that may be shown for one client each, and the reason for each other client.

    If only few clients allow nothing but sums, the others' answers and the total would reveal theirs: if they are fewer
    than two, or than `min_sites`, no answer is shown alone.
    """
    reasons = {**closed.refused, **closed.failures}
    per_site = {client for client, terms in closed.terms.items() if terms.metrics is MetricsLeave.PER_SITE}
    in_sums_alone = closed.answers.keys() - per_site
    reasons |= dict.fromkeys(in_sums_alone, IN_SUMS_ALONE)
    if in_sums_alone and len(in_sums_alone) < max(2, _min_sites(closed)):
        few = count_of(len(in_sums_alone), "site")
        why = f"{few} allow only sums, and the rest of the total would be theirs"
        return {}, reasons | dict.fromkeys(per_site, why)
    return {client: only_finite(closed.answers[client]) for client in sorted(per_site)}, reasons


def _min_sites(closed: CloseEvaluation) -> int:
    """Return the least number of clients in a sum that may be shown: the largest that any client requires."""
    return max((terms.min_sites for client, terms in closed.terms.items() if client in closed.answers), default=0)


def clients_to_ask(connected: Iterable[ClientId], *, most: int, seed: int, version: Version) -> list[ClientId]:
    """Return all connected clients, or a pseudo-random choice of `most` > 0 by seed, version and names alone."""
    if not most:
        return sorted(connected)
    order = sorted(connected, key=lambda c: hashlib.sha256(f"{seed} {version} {c}".encode()).digest())
    return sorted(order[:most])
