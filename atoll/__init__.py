"""Federated learning of one `Task`, which is deployed, simulated and trained centrally as the same object.

Everything that a project of yours imports is here:

    Task           a model in PyTorch, its data, loss and metrics
    Algorithm      the client's side of a custom federated algorithm
    Base           the files of a model's tensors that every site has and none sends
    Local          the settings of the local training in one round
    Context        the circumstances of a call of a task's function: site, round, version, options, settings
    Statistic      a number of a site's data, and the rule by which sites' numbers are merged
    Metric         a metric whose value is more than a ratio of two sums
    ArrayTask      the protocol of a task in numpy arrays, for scikit-learn and all else that is not PyTorch
    Instructions   the request to an `ArrayTask` for one local training
    Trained        the result of that training
    Grid           the nodes of a run of messages, for its server program: `program.main`
    Outgoing       a message of that program to a node, with its `Content`; the node's answer is a `Reply`
    Deadline       the end of the time that a training has
    task_name      the name of a task, the same on every machine
    load_task      the task that a reference `path/to/file.py:attribute` names
    simulate       a federation on this machine, as `atoll simulate`; returns a `SimulatedRun`
    train          a centralized training, as `atoll train`; returns a `Training`
    compare        runs beside each other, or a task both ways, as `atoll compare`; returns a `Comparison`
    sweep          a grid of simulations, as `atoll sweep`; returns a `Sweep`
    privacy_plan   the noise for an epsilon or the epsilon of a noise, as `atoll privacy plan`; returns a `PrivacyPlan`
    freeze_a       LoRA adapters of which only the factor B is trained (FFA-LoRA)
    codec_faults   the ways in which a custom codec breaks its contract
    connect        the runs of a coordinator, from its state directory or over the network; returns a `Federation`, with
                   a `DeployedRun`, its `DeployedRound` and each `Event`
    Table          rows of plain values, in all of these
    AtollError     the one exception of these calls, with the sentences that the commands print
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.ground.version import __version__ as __version__
    from atoll.interface.comparisons import Comparison, compare
    from atoll.interface.deployed import DeployedRound, DeployedRun, Federation, connect
    from atoll.interface.errors import AtollError
    from atoll.interface.following import Event
    from atoll.interface.privacy import PrivacyPlan, privacy_plan
    from atoll.interface.simulated import SimulatedRun, simulate
    from atoll.interface.sweeps import Sweep, sweep
    from atoll.interface.tables import Table
    from atoll.interface.trained import Training, train
    from atoll.task.algorithm import Algorithm
    from atoll.task.array_task import ArrayTask, Instructions, Trained
    from atoll.task.base import Base
    from atoll.task.content import Content
    from atoll.task.context import Context
    from atoll.task.deadline import Deadline
    from atoll.task.local import Local
    from atoll.task.metrics import Metric
    from atoll.task.programs.grid import Grid, Outgoing, Reply
    from atoll.task.statistic import Statistic
    from atoll.task.task import Task, load_task, task_name
    from atoll.tensors.codecs.contract import codec_faults
    from atoll.training.base.peft_models import freeze_a

APPS = "atoll.flower.framework"
"""The framework whose apps are tasks: `task.apps` finds it here, so that no room below names it."""

_PLACES = {
    "atoll.ground.version": ("__version__",),
    "atoll.tensors.codecs.contract": ("codec_faults",),
    "atoll.interface.comparisons": ("Comparison", "compare"),
    "atoll.interface.deployed": ("DeployedRound", "DeployedRun", "Federation", "connect"),
    "atoll.interface.errors": ("AtollError",),
    "atoll.interface.following": ("Event",),
    "atoll.interface.privacy": ("PrivacyPlan", "privacy_plan"),
    "atoll.interface.simulated": ("SimulatedRun", "simulate"),
    "atoll.interface.sweeps": ("Sweep", "sweep"),
    "atoll.interface.tables": ("Table",),
    "atoll.interface.trained": ("Training", "train"),
    "atoll.training.base.peft_models": ("freeze_a",),
    "atoll.task.programs.grid": ("Grid", "Outgoing", "Reply"),
    "atoll.task.algorithm": ("Algorithm",),
    "atoll.task.array_task": ("ArrayTask", "Instructions", "Trained"),
    "atoll.task.base": ("Base",),
    "atoll.task.content": ("Content",),
    "atoll.task.context": ("Context",),
    "atoll.task.deadline": ("Deadline",),
    "atoll.task.local": ("Local",),
    "atoll.task.metrics": ("Metric",),
    "atoll.task.statistic": ("Statistic",),
    "atoll.task.task": ("Task", "load_task", "task_name"),
}
"""The public names by their modules, which are imported at the first use of a name."""

__all__ = [
    "Algorithm",
    "ArrayTask",
    "AtollError",
    "Base",
    "Comparison",
    "Content",
    "Context",
    "Deadline",
    "DeployedRound",
    "DeployedRun",
    "Event",
    "Federation",
    "Grid",
    "Instructions",
    "Local",
    "Metric",
    "Outgoing",
    "PrivacyPlan",
    "Reply",
    "SimulatedRun",
    "Statistic",
    "Sweep",
    "Table",
    "Task",
    "Trained",
    "Training",
    "codec_faults",
    "compare",
    "connect",
    "freeze_a",
    "load_task",
    "privacy_plan",
    "simulate",
    "sweep",
    "task_name",
    "train",
]


def __getattr__(name: str) -> Any:
    """Return a public name, imported at its first use."""
    from importlib import import_module

    for module, names in _PLACES.items():
        if name in names:
            globals()[name] = found = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *__all__})
