"""Who trains and evaluates for an agent: a supervised worker process, or, for a benchmark, an object beside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from atoll.aggregation.tensors.layout import Piece
from atoll.client.session.events import Sums
from atoll.protocol.vocabulary import FailureReason


class RunnerFailed(RuntimeError):
    """A job came to nothing; the runner is ready for the next one."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOrder:
    """Train the model in one file and write the update, a safetensors file, into another.

    `own` is what this site has kept for itself; what it is to keep comes into `own_out`, when there is anything.
    """

    task: str
    model: Path
    out: Path
    round_id: int
    seed: int
    local: Mapping[str, Any]
    algorithm: str = "fedavg"
    own: Path | None = None
    own_out: Path
    model_seed: int = 0
    budget: float  # seconds from now; whoever trains stops by itself when they are over
    codec: str = ""  # of the update; empty: plain. Who cannot encode may write it plain
    owed: tuple[Path, ...] = ()  # what biased codecs left out before: is added
    residual: Path | None = None  # where to write what this one leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOrder:
    """Evaluate the model in a file on the site's test data."""

    task: str
    model: Path
    local: Mapping[str, Any]
    own: Path | None = None
    model_seed: int = 0
    budget: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a training has come to; its pieces lie in `TrainOrder.out`, in canonical order."""

    pieces: tuple[Piece, ...]
    num_examples: int
    work: float
    statistics: Sums
    seconds: float
    normalizer: float = 1.0  # FedNova's; `UpdateManifest` has both
    effective_steps: float = 1.0
    has_own: bool = False


class Runner(Protocol):
    """One job at a time. `extend`, `stop` and `kill` concern the one that runs, and return at once."""

    async def describe(self) -> int:
        """Get ready; returns the number of the site's training examples, 0 when not known.

        Raises:
            ConfigError: a task does not load.
        """
        ...

    async def train(self, order: TrainOrder) -> Training:
        """Raises RunnerFailed."""
        ...

    async def evaluate(self, order: EvaluateOrder) -> Sums | None:
        """The sums, None when there is no test data. Raises RunnerFailed."""
        ...

    def extend(self, budget: float) -> None:
        """The job may take so many seconds from now."""
        ...

    def stop(self) -> None:
        """End the job early, with what there is."""
        ...

    def kill(self) -> None:
        """End the job at once; it fails."""
        ...

    async def close(self) -> None:
        """Kill what runs, and start nothing again."""
        ...
