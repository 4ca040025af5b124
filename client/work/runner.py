"""The interface of an agent to its worker: orders (train, evaluate, answer, make statistics) and results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from atoll.client.session.events import Sums
from atoll.protocol.vocabulary import FailureReason
from atoll.protocol.wire.mesh_use import MeshUse
from atoll.tensors.layout import Layout, Piece
from atoll.tensors.masked.encode import Encoded
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.secure.keystream import Stream
from atoll.tensors.secure.plan import Encoding
from atoll.training.statistics.parts import SiteStatistics


class RunnerFailed(RuntimeError):
    """Error: a job failed; the runner is ready for the next one."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Order to a worker: the task, the run with its settings, and the time for the job."""

    task: str
    run_id: str = ""
    """Run of the job."""
    local: Mapping[str, Any]
    """Settings of the run for the task."""
    budget: float
    """Seconds from now after which the job ends by itself, or its result is no longer needed."""
    run_number: int = 0
    """Number of the run, for Flower apps; 0: not known."""
    asked_at: float = 0.0
    """Instant at which the coordinator asked first [s since the epoch]; 0: not known."""
    noise: bytes = field(default=b"", repr=False)
    """Key of the noise; empty: there is no secret here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeOrder:
    """Order to encode an update in parts for a secure sum, where its boxes are."""

    encoding: Encoding
    out: Path
    """Folder of the encoded parts."""
    rounding: bytes = field(repr=False)
    """Key of the numbers that decide between up and down, of this update alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOrder(Order):
    """Order to train the model in one file and to write the update, a safetensors file, into another."""

    model: Path
    out: Path
    """File of the update, or folder of an update in parts (`pieces.part_name`)."""
    round_id: int
    seed: int
    version: int = 0
    """Version of the global model."""
    algorithm: str = "fedavg"
    own: Path | None = None
    """File with the client state after the newest training that counted."""
    has_counted: bool = False
    """Whether the model includes an earlier update of this client; then a client state exists, if the algorithm has
    one."""
    own_out: Path
    """File for the client state after this training; not written if the algorithm has none."""
    model_seed: int = 0
    """Seed of the task's initial model."""
    codec: str = ""
    """Codec of the update; empty: plain. A runner that does not know the codec may write a plain update."""
    owed: tuple[Path, ...] = ()
    """Files of residuals from earlier updates, which this update adds."""
    residual: Path | None = None
    """File for the residual that this update leaves."""
    encode: EncodeOrder | None = None
    """Order to encode the update; a runner of one process leaves that to the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOrder(Order):
    """Order to evaluate the model in a file on the site's test data."""

    model: Path
    version: int = 0
    """Version of the global model."""
    own: Path | None = None
    """File with the client state after the newest training that counted."""
    model_seed: int = 0
    """Seed of the task's initial model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsOrder(Order):
    """Order to make statistics of the site's data."""

    model_seed: int = 0
    """Seed of the run."""
    question: str = ""
    """Layout of the secure sum that the statistics are for, JSON; empty: they are plain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOrder(Order):
    """Order to answer the message in one file and to write the reply, a safetensors file, into another."""

    kind: str
    """Kind of the message: "train", "evaluate" or "query", with an action as in "query.stats"."""
    group: str
    message: Path
    out: Path
    round_id: int
    """Number of the message in its run."""
    seed: int
    own: Path | None = None
    """File with the client state after the newest message whose reply was accepted."""
    own_out: Path
    """File for the client state after this message; not written if the task keeps none."""


@dataclass(frozen=True, slots=True)
class PartToMask:
    """Encoded part of an update, and the file of its masked form."""

    encoded: Path
    out: Path
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskOrder:
    """Order to mask the parts of an encoded update."""

    task: str
    layout: Layout
    """Tensors of the masked update, in the order of their positions."""
    parts: tuple[PartToMask, ...]
    streams: tuple[Stream, ...] = field(repr=False)
    """Keys with their signs: in memory alone, and dropped with the order."""
    share: GridNoise | None = None
    """Of this member in the noise of the sum; None: it adds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Result of a training."""

    pieces: tuple[Piece, ...]
    """The pieces of the update in `TrainOrder.out`, in canonical order; empty for an update in parts."""
    num_examples: int | float
    work: float
    """Fraction of the requested steps that were done, in (0, 1]."""
    statistics: Sums
    seconds: float
    normalizer: float = 1.0
    """FedNova's ‖a‖₁; see `UpdateManifest`."""
    effective_steps: float = 1.0
    """FedNova's share of τ_eff; see `UpdateManifest`."""
    has_own: bool = False
    """Whether `TrainOrder.own_out` was written."""
    parts: tuple[tuple[Piece, ...], ...] = ()
    """Pieces of each part, in canonical order; their bytes are in files of the folder `TrainOrder.out`."""
    mesh: MeshUse | None = None
    """Use of a mesh; None: one process."""
    steps: int = 0
    """Number of steps of the optimizer; 0: the task trains by itself."""
    encoded: Encoded | None = None
    """Encoding of the update, whose parts are in `EncodeOrder.out`; None: it is plain."""


class Runner(Protocol):
    """Runner of one job at a time; `extend`, `stop` and `kill` concern the running job and return at once.

    A real agent has `WorkerRunner`, a supervised worker process; tests and benchmarks have objects in the same process.
    """

    async def describe(self) -> int:
        """Get ready, and return the number of the site's training examples; 0: not known.

        Raises:
            ConfigError: a task does not load.
        """
        ...

    async def train(self, order: TrainOrder) -> Training:
        """Train the model of an order and write its update.

        Raises:
            RunnerFailed: no update was made.
        """
        ...

    async def message(self, order: MessageOrder) -> Training:
        """Answer the message of an order and write the reply, which has the form of an update of one example.

        Raises:
            RunnerFailed: no reply was made.
        """
        ...

    async def evaluate(self, order: EvaluateOrder) -> Sums | None:
        """Evaluate the model of an order, and return the sums; None: the site has no test data.

        Raises:
            RunnerFailed: no sums were made.
        """
        ...

    async def statistics(self, order: StatisticsOrder) -> SiteStatistics:
        """Make the statistics of the site's data, before the policy is applied.

        Raises:
            RunnerFailed: no statistics were made.
        """
        ...

    async def mask(self, order: MaskOrder) -> tuple[tuple[Piece, ...], ...] | None:
        """Mask parts, beside any job, and return their pieces; None: this runner does not, and the caller does."""
        ...

    def extend(self, budget: float) -> None:
        """Set the deadline of the running job to `budget` seconds from now."""
        ...

    def stop(self) -> None:
        """End the running job early; it returns its partial result."""
        ...

    def kill(self) -> None:
        """End the running job at once; it fails."""
        ...

    def run_ended(self, run_id: str) -> None:
        """Record the end of a run: a later job of it, after a resume, counts as a new start."""
        ...

    async def close(self) -> None:
        """Kill the running job, and accept no other."""
        ...
