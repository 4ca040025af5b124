"""The local work of the clients: their trainings, their evaluations, and the updates that they send."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from atoll.client.session.events import EvaluationRequest, Invitation, JobFailed
from atoll.ground.printable import count_of
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import ClientId, Digest, FailureReason, Version
from atoll.server.rounds.events import Update
from atoll.simulations.devices.fleet import Device
from atoll.simulations.engines.engine import Failed, Trained
from atoll.simulations.federation.client_states import ClientStates
from atoll.simulations.federation.efforts import Efforts
from atoll.simulations.federation.evaluations import Evaluations
from atoll.simulations.federation.kept_facts import NAME
from atoll.simulations.federation.models import Models
from atoll.simulations.federation.trainings import Training, Trainings
from atoll.simulations.federation.updates import Updates
from atoll.simulations.secure.sums import SimulatedSums
from atoll.task.errors import NotFinite, TaskBroken
from atoll.task.metrics import Statistics, sound
from atoll.tensors.masked.encode import NotFinite as NotEncoded
from atoll.training.worker.model_files import write_update


@dataclass(slots=True, kw_only=True)
class ClientWork:
    """Local work of all clients and the stores of its results."""

    efforts: Efforts
    trainings: Trainings
    evaluations: Evaluations
    versions: Models
    updates: Updates
    """Updates that wait for a fold."""
    states: ClientStates
    """States of the clients between rounds."""
    has_codec: bool
    """Whether a codec is used, so that clients have residuals."""
    kept_sizes: Mapping[ClientId, int] = field(default_factory=dict)
    """Numbers of examples that an earlier process has read, which each training confirms."""
    statistics: dict[Digest, Statistics]
    """Sums measured in the training of each update, by the update's digest."""
    sums: SimulatedSums | None = None
    """Secure sums of the run; None: updates are plain."""

    def begin(self, client_id: ClientId, device: Device, invitation: Invitation, now: float, budget: float) -> Training:
        """Begin a client's training, which must end within its budget [s]."""
        effort = self.efforts.of(client_id, device, invitation.base_version)
        return self.trainings.begin(client_id, invitation, effort, now, budget)

    def forget(self, training: Training) -> None:
        """Drop a training whose outcome is no longer needed."""
        self.trainings.forget(training)

    def num_evaluated(self, client_id: ClientId) -> int:
        """Return the number of examples of a client's evaluation."""
        return self.evaluations.num_examples(client_id)

    def evaluate(self, client_id: ClientId, request: EvaluationRequest) -> Statistics | str:
        """Return the sums of a client's evaluation, or the reason why there are none."""
        return self.evaluations.of_client(self.trainings.idle_engine(), client_id, request)

    def update_of(self, training: Training, download_seconds: float) -> Update | JobFailed:
        """Return the update of a finished training, or its failure, and store the client's new state."""
        outcome, invitation, name = self.trainings.outcome(training), training.invitation, training.client_id
        if isinstance(outcome, Failed):
            return JobFailed(invitation.key, FailureReason(outcome.kind), outcome.detail)
        if self.kept_sizes:
            self._confirm(name, outcome)
        if outcome.own:
            self.states.store(name, invitation.round_id, invitation.counted_round, outcome.own)
        digest = self.updates.digest_of(name, invitation.round_id, training.steps)
        if fault := self.versions.omission(outcome.update):
            raise TaskBroken(f"the training of client {name} failed: {fault}")
        if invitation.secure is not None:
            return self._encoded_for_sum(digest, training, outcome)
        if invitation.codec:
            plain_bytes = sum(array.nbytes for array in outcome.update.values())
            try:
                num_bytes = self._encoded(digest, training, outcome)
            except NotFinite as error:
                return JobFailed(invitation.key, FailureReason.NOT_FINITE, str(error))
            except TaskBroken as error:
                raise TaskBroken(f"client {name}: {error}") from error
        else:
            num_bytes = plain_bytes = self.updates.add(
                digest, outcome.update, outcome.report, outcome.row, outcome.magnitudes
            )
        self.statistics[digest] = statistics = sound(self.evaluations.metrics, outcome.statistics)
        return Update(
            name,
            invitation.round_id,
            invitation.base_version,
            digest,
            outcome.num_examples,
            outcome.work,
            num_bytes,
            statistics,
            download_seconds,
            training.ends - training.began,
            plain_bytes,
            steps=outcome.report.get("steps", 0),
        )

    def _encoded_for_sum(self, digest: Digest, training: Training, outcome: Trained) -> Update | JobFailed:
        """Encode an update for a secure sum, and return what its masked form claims: nothing about this client."""
        assert self.sums is not None
        invitation, layout = training.invitation, self.versions.version(Version(0)).manifest.layout
        statistics = sound(self.evaluations.metrics, outcome.statistics)
        try:
            num_bytes = self.sums.encode(
                training.client_id, invitation, digest, outcome.update, layout, outcome.num_examples, statistics
            )
        except NotEncoded as error:
            return JobFailed(invitation.key, FailureReason.NOT_FINITE, str(error))
        return Update(
            training.client_id,
            invitation.round_id,
            invitation.base_version,
            digest,
            1,
            1.0,
            num_bytes,
            plain_bytes=num_bytes,
        )

    def _confirm(self, name: ClientId, outcome: Trained) -> None:
        """Check that a client has trained on the number of examples that an earlier process counted.

        Raises:
            ConfigError: the number has changed.
        """
        units = getattr(self.efforts.task, "units", None)
        if not callable(units) and outcome.num_examples != self.kept_sizes[name]:
            what = f"site {name!r} has trained on {count_of(outcome.num_examples, 'example')}"
            before = f"and had {self.kept_sizes[name]} when the sites were counted, so its data has changed"
            way_out = f"delete {NAME.format('*')} in the folder of the run or sweep, and run it again"
            raise ConfigError([f"{what}, {before}: {way_out}"])

    def _encoded(self, digest: Digest, training: Training, outcome: Trained) -> int:
        """Encode an update and store it; return its size [bytes]."""
        invitation, name = training.invitation, training.client_id
        file, residual = self.updates.folder / f"{digest}.encoded", self.states.residual(name)
        pieces = write_update(
            file,
            outcome.update,
            codec=invitation.codec,
            seed=invitation.seed,
            buffers=self.versions.buffers,
            residuals=[residual] if residual else [],
            residual=self.states.staged_residual(name, invitation.round_id),
        )
        return self.updates.add_encoded(digest, file, pieces, outcome.report)

    def settle(self, update: Update, *, accepted: bool) -> None:
        """Make the residual of an accepted update current; drop a refused update's residual."""
        if self.has_codec:
            self.states.settle_residual(update.client_id, update.round_id, accepted=accepted)

    def keep_only(self, digests: Collection[Digest]) -> None:
        """Drop all other updates and their statistics."""
        self.updates.keep_only(digests)
        self.statistics = {digest: sums for digest, sums in self.statistics.items() if digest in digests}
