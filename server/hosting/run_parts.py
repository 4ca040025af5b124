"""The parts from which a run's driver is built: the run's, and those that all runs share."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from atoll.protocol.vocabulary import ClientId, Digest, RunId, RunState
from atoll.server.clock import MonotoneClock
from atoll.server.config.run import RunConfig
from atoll.server.folding.evaluator import Evaluator
from atoll.server.folding.reducer import Reducer
from atoll.server.hosting.control_streams import Hub
from atoll.server.journal.journal import Journal
from atoll.server.journal.rows import Batch
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import Sampler


@dataclass(frozen=True, slots=True)
class RunParts:
    """Parts from which the driver of one run is built."""

    run_id: RunId
    config: RunConfig
    task: str
    """The task's name, as clients list it in Hello."""
    machine: RunMachine
    seq: int
    """The sequence number of the last event that `machine` has received."""
    reducer: Reducer
    evaluator: Evaluator
    sampler: Sampler | Oort
    number: int = 0
    """The number of the run, for Flower apps."""


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Parts that all runs of a coordinator share."""

    journal: Journal
    journal_thread: Executor
    """Only thread that writes to `journal`."""
    hub: Hub
    clock: MonotoneClock
    keep_rounds: int
    """Number of round records that the journal keeps for each run."""
    crash: Callable[[BaseException], None]
    """Ends the process after an internal error; the next process replays the journal."""
    is_in_flight: Callable[[RunId, Digest], bool]
    """Returns True while an update of the run is being received or judged."""
    assign_rank: Callable[[], int]
    """Returns the aggregation rank that receives the update of the next invited client."""
    codecs_of_rank: Callable[[int], frozenset[str] | None] | None
    """Returns the codecs of an aggregation rank, None while it is away; if this field is None, there are no ranks."""
    announce_end: Callable[[RunId, Collection[ClientId], RunState, str], None]
    """Sends the end of a run, with its state and cause, to the run's connected members."""
    authorities: Callable[[], bytes] = bytes
    """Returns the certificates of the trusted authorities, PEM; empty: the coordinator is `--insecure`."""
    num_ranks: int = 0
    """Number of aggregation ranks; 0: the coordinator receives the updates."""
    on_commit: Sequence[Callable[[Batch, float], None]] = ()
    """Called, once a group commit is on disk, with its rows and its duration [s]; the sequence may grow."""
