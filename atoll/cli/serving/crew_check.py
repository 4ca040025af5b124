"""The check of an agent's crew (the ranks that train one client): its plan, and the memory that each rank needs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from atoll.cli.printing import note
from atoll.ground.faults import faults_in
from atoll.ground.printable import count_of, printable_size

if TYPE_CHECKING:
    from atoll.client.crew_config import CrewConfig
    from atoll.parallel.mesh_client.needs import RankNeeds
    from atoll.parallel.planner.choice import Choice
    from atoll.task.task import ArrayTask, Task


@dataclass(frozen=True, slots=True)
class Needs:
    """The plan of a crew (a client's ranks) for one task, and the memory that each rank needs."""

    choice: "Choice"
    ranks: "list[RankNeeds]"


def check_crew(
    crew: "CrewConfig", tasks: "Mapping[str, Task | ArrayTask]", device: str = "auto"
) -> Mapping[str, Needs]:
    """Check that a mesh can train the tasks with their settings, and return its plans and needs, by reference.

    Args:
        crew: the settings.
        tasks: the tasks, by reference.
        device: "auto", "cpu" or "cuda"; with `mesh = "auto"` all ranks have the memory of those on this machine.

    Raises:
        ConfigError: the mesh cannot train them; the message lists every reason.
    """
    from atoll.parallel.mesh_client.needs import needs_of_ranks
    from atoll.protocol.settings import ConfigError
    from atoll.task.task import Task

    faults, fitting = [], {}
    for reference, task in tasks.items():
        try:
            if not isinstance(task, Task):
                raise ConfigError(["an ArrayTask trains with its own code, not on a mesh: leave out crew.mesh"])
            fitting[reference] = task, _choice(crew, task, device)
        except ConfigError as error:
            faults += [f"{reference}: {fault}" for fault in error.faults]
    if faults:
        raise ConfigError(faults)
    return {
        reference: Needs(choice, needs_of_ranks(task, task.local, choice.plan))
        for reference, (task, choice) in fitting.items()
    }


def _choice(crew: "CrewConfig", task: "Task", device: str) -> "Choice":
    """Choose the parallel plan of a crew (a client's ranks) for a task.

    Raises:
        ConfigError: a mesh cannot train it; the message lists every reason.
    """
    from atoll.parallel.mesh_client.choice import choice_for
    from atoll.parallel.mesh_client.faults import faults_of_mesh
    from atoll.parallel.planner.choice import Choice
    from atoll.parallel.planner.rank_memory import machine_of
    from atoll.protocol.settings import ConfigError
    from atoll.task.errors import TaskBroken
    from atoll.training.worker.site_task import device_of

    if not crew.is_auto:
        if found := faults_of_mesh(task, task.local, "fedavg", crew.parallel):
            raise ConfigError(found)
        return Choice(crew.parallel, "")
    try:
        machine = machine_of(device_of({"device": device}), crew.num_here)
        return choice_for(task, task.local, "fedavg", crew.num_ranks, machine, crew.plan)
    except (TaskBroken, ValueError) as error:
        raise ConfigError(faults_in(error)) from error


def document(needs: Mapping[str, Needs]) -> dict[str, Any]:
    """Return the plans, and the memory that each rank needs, in JSON types."""
    return {
        "plans": {task: asdict(of_task.choice) for task, of_task in needs.items()},
        "ranks": {
            task: [asdict(rank) | {"peak": rank.peak} for rank in of_task.ranks] for task, of_task in needs.items()
        },
    }


def note_crew(crew: "CrewConfig", needs: Mapping[str, Needs]) -> None:
    """Print the plans of a crew (a client's ranks), and the memory that its ranks need, equal ranks together."""
    machines = count_of(crew.nodes, "machine")
    for text in dict.fromkeys(_planned(of_task.choice) for of_task in needs.values()):
        note(f"a crew of {count_of(crew.num_ranks, 'rank')} on {machines}: {text}")
    for task, of_task in needs.items():
        if of_task.choice.why:
            note(f"{task}: mesh auto is {of_task.choice.why}")
        alike: dict[str, list[int]] = {}
        for rank in of_task.ranks:
            alike.setdefault(_said(rank), []).append(rank.rank)
        for said, numbers in alike.items():
            note(f"{task}: {'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}: {said}")


def _planned(choice: "Choice") -> str:
    return f"{choice.plan.mesh}, ZeRO {choice.plan.zero_stage}, {choice.plan.precision}"


def _said(rank: "RankNeeds") -> str:
    peak = f"at least {printable_size(rank.peak)}" if rank.optimizer is None else printable_size(rank.peak)
    return (
        f"holds {count_of(rank.boxes, 'box', 'boxes')} ({printable_size(rank.held)}), sends {rank.own_boxes} "
        f"({printable_size(rank.own)}), needs {peak} and activations"
    )
