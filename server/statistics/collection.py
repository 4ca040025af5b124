"""A collection of statistics from the sites of a task: requests, answers, end. Pure.

It is not journaled: it only reads, and an operator repeats it after a crash. Data that several sites allow only in sums
is in memory until the end, and never on disk.
"""

from dataclasses import dataclass, field

from atoll.protocol.disclosure import Disclosure
from atoll.protocol.vocabulary import ClientId
from atoll.training.statistics.parts import SiteStatistics

SILENT = "did not answer in time"
CANNOT = "its agent cannot give statistics: update it"
NO_ROOM = "the coordinator has no room for further answers"

BYTES_MAX = 256 * 2**20
"""Largest total size of all answers to one request [bytes]."""


@dataclass(slots=True)
class Collection:
    """Request to the sites that were connected when it began."""

    asked: frozenset[ClientId]
    answers: dict[ClientId, SiteStatistics] = field(default_factory=dict)
    terms: dict[ClientId, Disclosure] = field(default_factory=dict)
    failures: dict[ClientId, str] = field(default_factory=dict)
    num_bytes: int = 0

    @property
    def is_complete(self) -> bool:
        """Return whether every site has answered or failed."""
        return len(self.answers) + len(self.failures) >= len(self.asked)

    def is_waiting_for(self, client_id: ClientId) -> bool:
        """Return whether a site's answer is awaited."""
        return client_id in self.asked and client_id not in self.answers and client_id not in self.failures

    def answered(self, client_id: ClientId, answer: SiteStatistics, terms: Disclosure, num_bytes: int) -> None:
        """Record the answer of a site, and the terms on which it may be shown."""
        if not self.is_waiting_for(client_id):
            return
        if self.num_bytes + num_bytes > BYTES_MAX:
            self.failures[client_id] = NO_ROOM
            return
        self.answers[client_id], self.terms[client_id] = answer, terms
        self.num_bytes += num_bytes

    def failed(self, client_id: ClientId, why: str) -> None:
        """Record the reason why a site gives no answer."""
        if self.is_waiting_for(client_id):
            self.failures[client_id] = why

    def close(self) -> None:
        """End the collection: a site without an answer has failed."""
        for client_id in self.asked:
            self.failed(client_id, SILENT)
