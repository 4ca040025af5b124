"""The interfaces between a simulated coordinator, the federation around it, and the sites with their work."""

from typing import Protocol

from atoll.client.session import events as client
from atoll.protocol.vocabulary import ClientId, Digest, Version
from atoll.server.folding.sums import SumsFolded
from atoll.server.rounds.events import Abandon, Aggregate, CloseEvaluation, Commit, Update
from atoll.server.rounds.session_events import TellMember
from atoll.simulations.devices.fleet import Device
from atoll.simulations.federation.trainings import Training
from atoll.simulations.secure.sums import SimulatedSums
from atoll.task.metrics import Metrics, Statistics


class Host(Protocol):
    """Federation that a service coordinates: it folds and measures models, and records the rounds."""

    sums: SimulatedSums | None
    """Secure sums of the run; None: updates are plain."""

    @property
    def metrics(self) -> Metrics:
        """The metrics of the task."""

    def fold(self, effect: Aggregate) -> Digest:
        """Make the next version of the model.

        Raises:
            ValueError: the updates cannot be folded.
            OSError: a file cannot be read or written.
        """

    def next_clip_norm(self, effect: Aggregate) -> float:
        """Return the clip norm of the private round after a folded one; 0: it is fixed, or the run is not private."""

    def fold_sums(self, effect: Aggregate) -> SumsFolded:
        """Make the next version of the model from opened secure sums.

        Raises:
            ValueError: the updates cannot be folded, or no sum counts.
            OSError: a file cannot be read or written.
        """

    def evaluate(self, version: Version) -> Statistics | str:
        """Measure a version on the server's test data; return the sums, or the reason why there are none."""

    def evaluation_asked(self, client_id: ClientId, request: client.EvaluationRequest) -> None:
        """Record that a client was asked to evaluate a version."""

    def next_round(self) -> None:
        """Finish the record of the last round: the next one is about to begin."""

    def round_ended(self, effect: Commit | Abandon) -> None:
        """Begin the results line of a round that was committed or abandoned; the measurements follow."""

    def clients_evaluated(self, effect: CloseEvaluation) -> None:
        """Record the clients' measures of a version."""

    def run_ended(self) -> None:
        """End the federation's run, because the run of the coordinator has ended."""


class Client(Protocol):
    """Client's site: its identity, its control stream, and its profile."""

    client_id: ClientId
    is_awake: bool
    life: int

    @property
    def name_of_session(self) -> str:
        """The name of the control stream that is open."""

    @property
    def num_examples(self) -> int:
        """The number of the client's training examples."""

    def hear(self, event: client.Event) -> None:
        """Receive a message from the coordinator."""

    def asked_in_sum(self, effect: TellMember) -> None:
        """Receive a question to the client's member of a session."""


class Work(Protocol):
    """Local work of the sites: it takes virtual time by their devices, and is computed when its result is needed."""

    def begin(
        self, client_id: ClientId, device: Device, invitation: client.Invitation, now: float, budget: float
    ) -> Training:
        """Begin the work of an invitation, which must end within its budget [s]."""

    def forget(self, training: Training) -> None:
        """Drop work whose outcome is no longer needed."""

    def update_of(self, training: Training, download_seconds: float) -> Update | client.JobFailed | None:
        """Return the update of work that has ended, or its failure."""

    def settle(self, update: Update, *, accepted: bool) -> None:
        """Keep or drop the files that a site has stored with an answered update."""

    def num_evaluated(self, client_id: ClientId) -> int:
        """Return the number of examples of a client's evaluation."""

    def evaluate(self, client_id: ClientId, request: client.EvaluationRequest) -> Statistics | str:
        """Return the sums of a client's evaluation, or the reason why there are none."""
