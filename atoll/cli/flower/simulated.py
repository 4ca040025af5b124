"""A simulated run of a Flower app: all clients in this process, then the rest of its main()."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.experiments.messages import run_messages, say_messages
from atoll.cli.experiments.simulate import run_simulation, with_signals
from atoll.cli.files import load_app
from atoll.cli.printing import note, say
from atoll.cli.stopping import INTERRUPTED
from atoll.parallel.worker.flower_task import NODES, FlowerTask

if TYPE_CHECKING:
    from atoll.simulations.federation.federation import Federation


def simulate_app(reference: str, overrides: Sequence[str], *, nodes: int | None, out: Path | None) -> int:
    """Simulate an app to the end of its main(), and return the exit code.

    Args:
        reference: of the app.
        overrides: `key=value`.
        nodes: the number of clients; None: that of the project, or 10.
        out: the folder of the run.

    Raises:
        CommandError: the app's code fails.
    """
    from atoll.cli.experiments.simulation_progress import RoundProgress
    from atoll.simulations.federation.config import SimulationFile

    file, app = load_app(reference, overrides, SimulationFile, nodes=nodes)
    folder = out or Path(f"atoll-flower-{file.name}-simulated")
    task = FlowerTask(app, nodes or app.num_supernodes or NODES, folder=folder / "app")
    if file.run.is_of_messages:
        result = run_messages(file, task, folder, handling=with_signals)
        say_messages(result, folder)
        return {"finished": 0, "interrupted": INTERRUPTED}.get(result["state"], 1)

    @contextmanager
    def to_the_end_of_main(federation: "Federation") -> Iterator[None]:
        with with_signals(federation):
            yield
        _conclude(federation, folder)

    with RoundProgress(sys.stderr, note, rounds=file.rounds) as progress:
        result = run_simulation(file, task, folder, progress.round, handling=to_the_end_of_main)
    say(f"{result['state']}: {result['cause'] or 'rounds are left'}; everything is in {folder}")
    return 0 if result["state"] == "finished" else 1


def _conclude(federation: "Federation", folder: Path) -> None:
    """Let main() go on with the result of a finished run."""
    from atoll.protocol.vocabulary import RunState
    from atoll.simulations.experiments.report import read_run
    from atoll.simulations.federation.report import history_of

    ledger, task = federation.machine.ledger, federation.setting.task
    if ledger.state is not RunState.FINISHED:
        return
    assert isinstance(task, FlowerTask)
    assert ledger.model_digest is not None
    history = history_of(read_run(folder).rounds)
    task.conclude(federation.versions.arrays(ledger.model_digest), history)
