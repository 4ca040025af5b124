"""The local work of the clients: their trainings, their evaluations, and the updates that they send."""

from collections.abc import Collection
from dataclasses import dataclass

from atoll.client.session.events import JobFailed
from atoll.parallel.task.metrics import Statistics
from atoll.parallel.worker.model_files import write_update
from atoll.protocol.vocabulary import Digest, FailureReason
from atoll.server.rounds.events import Update
from atoll.simulations.engines.engine import Failed, Trained
from atoll.simulations.federation.efforts import Efforts
from atoll.simulations.federation.evaluations import Evaluations
from atoll.simulations.federation.models import Models
from atoll.simulations.federation.own import OwnStates
from atoll.simulations.federation.trainings import Training, Trainings
from atoll.simulations.federation.updates import Updates


@dataclass(slots=True, kw_only=True)
class ClientWork:
    """See the module docstring."""

    efforts: Efforts
    trainings: Trainings
    evaluations: Evaluations
    versions: Models
    updates: Updates
    """The updates that wait for a fold."""
    own: OwnStates
    """The state that each client keeps between rounds."""
    has_codec: bool
    """The run encodes its updates, so that a client keeps what its codec leaves out."""
    statistics: dict[Digest, Statistics]
    """The sums that the training of each update has measured, by the update's digest."""

    def update_of(self, training: Training, download_seconds: float) -> Update | JobFailed:
        """Return what a client sends when its training is over, and keep what stays with the client."""
        outcome, invitation, name = self.trainings.outcome(training), training.invitation, training.client_id
        if isinstance(outcome, Failed):
            return JobFailed(invitation.key, FailureReason(outcome.kind), outcome.detail)
        if outcome.own:
            self.own.keep(name, invitation.round_id, invitation.counted_round, outcome.own)
        digest = self.updates.digest_of(name, invitation.round_id, training.steps)
        if invitation.codec:
            plain_bytes = sum(array.nbytes for array in outcome.update.values())
            num_bytes = self._encoded(digest, training, outcome)
        else:
            num_bytes = plain_bytes = self.updates.add(
                digest, outcome.update, outcome.report, outcome.row, outcome.magnitudes
            )
        self.statistics[digest] = outcome.statistics
        return Update(
            name,
            invitation.round_id,
            invitation.base_version,
            digest,
            outcome.num_examples,
            outcome.work,
            num_bytes,
            outcome.statistics,
            download_seconds,
            training.ends - training.began,
            plain_bytes,
        )

    def _encoded(self, digest: Digest, training: Training, outcome: Trained) -> int:
        """Encode an update and keep it; return its size [bytes]."""
        invitation, name = training.invitation, training.client_id
        file, residual = self.updates.folder / f"{digest}.encoded", self.own.residual(name)
        pieces = write_update(
            file,
            outcome.update,
            codec=invitation.codec,
            seed=invitation.seed,
            buffers=self.versions.buffers,
            owed=[residual] if residual else [],
            residual=self.own.staged_residual(name, invitation.round_id),
        )
        return self.updates.add_encoded(digest, file, pieces, outcome.report)

    def settle(self, update: Update, *, accepted: bool) -> None:
        """Keep what the codec left out of an update that was accepted; drop that of one that was not."""
        if self.has_codec:
            self.own.settle_residual(update.client_id, update.round_id, accepted=accepted)

    def keep_only(self, digests: Collection[Digest]) -> None:
        """Forget all other updates."""
        self.updates.keep_only(digests)
        self.statistics = {digest: sums for digest, sums in self.statistics.items() if digest in digests}
