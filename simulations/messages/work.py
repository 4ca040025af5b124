"""The clients' answers to messages: their computation, the states that stay at the clients, and the replies' files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.client.session.events import EvaluationRequest, Invitation, JobFailed
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.vocabulary import ClientId, Digest, FailureReason
from atoll.server.programs.contents import Contents
from atoll.server.rounds.events import Update
from atoll.simulations.devices.fleet import Device
from atoll.simulations.engines.engine import Failed
from atoll.simulations.federation.client_states import ClientStates
from atoll.simulations.federation.trainings import Effort, Training
from atoll.simulations.messages.answering import Engine, Outcome, Question
from atoll.task.metrics import Statistics


@dataclass(frozen=True, slots=True)
class StoredReply:
    """Bytes of a reply, one tensor after the other."""

    path: Path
    tensors: tuple[tuple[str, int], ...]
    """Name and size of each tensor [bytes]."""


class Answering(Training):
    """Work for one message: all of it, or none."""

    seconds: float = 0.0
    """Real time of its computation [s], once it is known."""

    def plan(self, budget_ends: float) -> None:
        """Plan the end: of the work, or of the budget if the work exceeds it, on the device or in real time."""
        super().plan(budget_ends)
        if self.seconds > budget_ends - self.began:
            self.steps = 0
        if not self.steps:
            self.ends = budget_ends
        self.budget_ends = budget_ends

    @property
    def fault(self) -> str:
        """The reason why there is no reply."""
        return "the answer was not ready in time"


class MessageWork:
    """Local work of all clients of a run of messages; see `federation.host.Work`.

    An answer takes the time of one pass over the client's examples; if its computation takes longer than the message
    allows, it is late, as it would be at an agent.

    Args:
        engine: computes the answers.
        contents: the contents of the messages.
        states: the states of the clients between messages.
        num_examples: the number of each client's examples.
        folder: the folder for the replies' files.
    """

    def __init__(
        self,
        engine: Engine,
        contents: Contents,
        states: ClientStates,
        num_examples: Mapping[ClientId, int],
        folder: Path,
    ) -> None:
        self._engine, self._contents, self._states = engine, contents, states
        self._num_examples, self._folder = num_examples, folder
        self._open: dict[Training, Callable[[], Outcome]] = {}
        self.replies: dict[Digest, StoredReply] = {}
        self.num_answers = 0
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, client_id: ClientId, device: Device, invitation: Invitation, now: float, budget: float) -> Training:
        """Begin with a message; its answer is complete, or there is none."""
        count = self._num_examples[client_id]
        training = Answering(client_id, invitation, Effort(count, 1, device.train_seconds(count)), now)
        training.plan(now + budget)
        if training.steps:
            self._open[training] = self._engine.begin(self._question(client_id, invitation))
        return training

    def _question(self, client_id: ClientId, invitation: Invitation) -> Question:
        return Question(
            client_id=client_id,
            kind=invitation.message,
            group=invitation.group,
            number=invitation.round_id,
            seed=invitation.seed,
            run_number=invitation.run_number,
            asked_at=invitation.asked_at,
            content=self._contents.keep(invitation.model_digest).path,
            own=self._states.find(client_id, invitation.counted_round),
            out=self._folder / f"{invitation.round_id}.bin",
        )

    def forget(self, training: Training) -> None:
        """Drop a message whose answer is no longer needed."""
        self._open.pop(training, None)

    def update_of(self, training: Training, download_seconds: float) -> Update | JobFailed | None:
        """Return the reply to a message, or its failure, and store the client's new state; None: it ends later."""
        invitation, begun = training.invitation, self._open.pop(training, None)
        if begun is None:  # its deadline has moved since
            begun = self._engine.begin(self._question(training.client_id, invitation))
        outcome = begun()
        assert isinstance(training, Answering)
        training.seconds = 0.0 if isinstance(outcome, Failed) else outcome.seconds
        training.plan(training.budget_ends)
        if not training.steps:
            return None
        self.num_answers += 1
        if isinstance(outcome, Failed):
            return JobFailed(invitation.key, FailureReason(outcome.kind), outcome.detail)
        client_id, number = training.client_id, invitation.round_id
        if outcome.own:
            self._states.store(client_id, number, invitation.counted_round, outcome.own)
        manifest = UpdateManifest(
            run_id=invitation.run_id,
            round_id=number,
            client_id=client_id,
            base_version=invitation.base_version,
            base_digest=invitation.model_digest,
            num_examples=1,
            work=1.0,
            pieces=outcome.pieces,
        )
        digest = manifest.digest
        tensors = tuple((piece.tensor, piece.num_bytes) for piece in outcome.pieces)
        self.replies[digest] = StoredReply(self._folder / f"{number}.bin", tensors)
        return Update(
            client_id, number, invitation.base_version, digest, 1, 1.0, manifest.num_bytes, {}, download_seconds
        )

    def settle(self, update: Update, *, accepted: bool) -> None:
        """Do nothing: the coordinator may have a reply whose confirmation was lost; files stay until the run ends."""

    def num_evaluated(self, client_id: ClientId) -> int:
        """Raise NotImplementedError: message runs have no evaluation rounds."""
        raise NotImplementedError

    def evaluate(self, client_id: ClientId, request: EvaluationRequest) -> Statistics | str:
        """Raise NotImplementedError: message runs have no evaluation rounds."""
        raise NotImplementedError
