"""The interfaces of the federation and of a client that the simulated coordinator uses."""

from typing import Protocol

from atoll.client.session import events as client
from atoll.parallel.task.metrics import Metrics, Statistics
from atoll.protocol.vocabulary import ClientId, Digest, Version
from atoll.server.rounds.events import Abandon, Aggregate, CloseEvaluation, Commit


class Host(Protocol):
    """The federation that a service coordinates: it folds and measures models, and records the rounds."""

    @property
    def metrics(self) -> Metrics:
        """The metrics of the task."""

    def fold(self, effect: Aggregate) -> Digest:
        """Make the next version of the model.

        Raises:
            ValueError: the updates cannot be folded.
            OSError: a file cannot be read or written.
        """

    def evaluate(self, version: Version) -> Statistics | str:
        """Measure a version on the server's test data; return the sums, or the reason that there are none."""

    def next_round(self) -> None:
        """Finish the record of the last round: the next one is about to begin."""

    def round_ended(self, effect: Commit | Abandon) -> None:
        """Begin the record of a round that was committed or abandoned."""

    def clients_evaluated(self, effect: CloseEvaluation) -> None:
        """Record the clients' measures of a version."""

    def run_ended(self) -> None:
        """Stop: the run has ended."""


class Client(Protocol):
    """A client's site: its identity, its control stream, and its profile."""

    client_id: ClientId
    is_awake: bool
    life: int

    @property
    def name_of_session(self) -> str:
        """The name of the control stream that is open."""

    @property
    def num_examples(self) -> int:
        """The number of its training examples."""

    def hear(self, event: client.Event) -> None:
        """Take a message from the coordinator."""
