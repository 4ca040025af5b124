"""Many clients in one process: `python -m benchmarks.crowd ADDRESS FOLDER FIRST COUNT`.

Each client is a whole agent, with its own session, spool, model cache and gRPC connection. Only the training is
replaced: an update of all ones is written at once. The process prints `ready` when all clients are connected, and ends
at SIGTERM.
"""

import asyncio
import signal
import sys
from pathlib import Path

import numpy as np

from atoll.client.agent import Agent
from atoll.client.config import AgentConfig
from atoll.client.disk.seen_store import Memory
from atoll.client.disk.state_directory import StateDirectory
from atoll.client.disk.verifier import Verifier
from atoll.client.policy.gate import Gate
from atoll.client.session.events import Sums
from atoll.client.work.runner import EvaluateOrder, Training, TrainOrder
from atoll.tensors.layout import Piece
from atoll.tensors.safetensors_file import NUMPY_DTYPES, parse_header, write
from benchmarks.members import member

TASK = "benchmarks.tasks:empty"
DIALS_AT_ONCE = 50


class Instant:
    """A runner that takes no time: its update has all ones, in the shape of the first model."""

    def __init__(self) -> None:
        self._update: bytes | None = None
        self._pieces: tuple[Piece, ...] = ()

    async def describe(self) -> int:
        """Return one example."""
        return 1

    async def train(self, order: TrainOrder) -> Training:
        """Write the update of all ones."""
        if self._update is None:
            layout, _ = parse_header(order.model)
            self._pieces = write(order.out, {t.name: np.ones(t.shape, NUMPY_DTYPES[t.dtype]) for t in layout})
            self._update = order.out.read_bytes()
        order.out.write_bytes(self._update)
        return Training(pieces=self._pieces, num_examples=1, work=1.0, statistics={}, seconds=0.0)

    async def evaluate(self, order: EvaluateOrder) -> Sums | None:
        """Return None: there is no data."""
        return None

    def extend(self, budget: float) -> None:
        """Do nothing, as nothing runs."""

    def stop(self) -> None:
        """Do nothing, as nothing runs."""

    def kill(self) -> None:
        """Do nothing, as nothing runs."""

    def run_ended(self, run_id: str) -> None:
        """Do nothing, as there are no data."""

    async def close(self) -> None:
        """Do nothing, as nothing runs."""


async def crowd(address: str, coordinator_state: Path, folder: Path, first: int, count: int) -> None:
    """Run `count` clients until SIGTERM."""
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    agents: list[Agent] = []
    running: list[asyncio.Task[int]] = []
    for number in range(first, first + count):
        name = f"client-{number:05d}"
        config = AgentConfig(site=name, state=folder / name, reconnect_max=2.0)
        state = StateDirectory(config.state)
        place = await member(coordinator_state, config.state, name, address)
        verifier = Verifier(name, lambda keeper=place.keeper: keeper.current.ca_pem, Memory(state.seen))
        agent = Agent(config, [TASK], Instant(), state, Gate(None, state.path), place, verifier)
        agents.append(agent)
        running.append(asyncio.ensure_future(agent.run()))
        await connected(agents, but=DIALS_AT_ONCE)
    await connected(agents)
    print("ready", flush=True)
    ended = asyncio.ensure_future(end.wait())
    await asyncio.wait([ended, *running], return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        if task.done():
            task.result()  # a client that ends by itself is an error
        task.cancel()


async def connected(agents: list[Agent], *, but: int = 0) -> None:
    """Wait until all agents but `but` are connected."""
    while sum(not agent.session.is_connected for agent in agents) > but:  # noqa: ASYNC110 - agents announce nothing
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(crowd(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])))
