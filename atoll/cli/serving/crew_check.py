"""The crew of an agent, for `atoll agent --check`: what a mesh cannot train, its plan, and the needs of each rank."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from atoll.aggregation.printable import count_of, printable_size
from atoll.cli.printing import note

if TYPE_CHECKING:
    from atoll.client.crew_config import CrewConfig
    from atoll.parallel.crew.needs import RankNeeds
    from atoll.parallel.task.task import ArrayTask, Task

Needs = Mapping[str, "list[RankNeeds]"]
"""The needs of all ranks by the reference of a task."""


def check_crew(crew: "CrewConfig", tasks: "Mapping[str, Task | ArrayTask]") -> Needs:
    """Check that a mesh can train the tasks, with their own settings, and return the needs of its ranks.

    Raises:
        ConfigError: with everything that it cannot take.
    """
    from atoll.parallel.crew.faults import faults_of_mesh
    from atoll.parallel.crew.needs import needs_of_ranks
    from atoll.parallel.task.task import Task
    from atoll.protocol.settings import ConfigError

    faults, fitting = [], {}
    for reference, task in tasks.items():
        if isinstance(task, Task):
            found = faults_of_mesh(task, task.local, "fedavg", crew.parallel)
            fitting[reference] = task
        else:
            found = ["an ArrayTask trains with its own code, not on a mesh: leave out crew.mesh"]
        faults += [f"{reference}: {fault}" for fault in found]
    if faults:
        raise ConfigError(faults)
    return {reference: needs_of_ranks(task, task.local, crew.parallel) for reference, task in fitting.items()}


def document(needs: Needs) -> dict[str, Any]:
    """Return the needs for a script."""
    return {task: [asdict(rank) | {"peak": rank.peak} for rank in ranks] for task, ranks in needs.items()}


def note_crew(crew: "CrewConfig", needs: Needs) -> None:
    """Print the plan of a crew, and the needs of its ranks, equal ones together."""
    plan, machines = crew.parallel, count_of(crew.nodes, "machine")
    note(
        f"a crew of {count_of(crew.num_ranks, 'rank')} on {machines}: {plan.mesh}, ZeRO {plan.zero_stage}, "
        f"{plan.precision}"
    )
    for task, ranks in needs.items():
        alike: dict[str, list[int]] = {}
        for rank in ranks:
            alike.setdefault(_said(rank), []).append(rank.rank)
        for said, numbers in alike.items():
            note(f"{task}: {'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}: {said}")


def _said(rank: "RankNeeds") -> str:
    peak = f"at least {printable_size(rank.peak)}" if rank.optimizer is None else printable_size(rank.peak)
    return (
        f"holds {count_of(rank.boxes, 'box', 'boxes')} ({printable_size(rank.held)}), sends {rank.own_boxes} "
        f"({printable_size(rank.own)}), needs {peak} and activations"
    )
