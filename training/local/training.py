"""The training and the evaluation of one client's model, in one process."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from atoll.ground.printable import count_of
from atoll.task.array_task import is_work
from atoll.task.deadline import Deadline
from atoll.task.errors import OutOfTime, TaskBroken
from atoll.task.local import Local
from atoll.task.metrics import Statistics, add, as_statistics
from atoll.task.randomness import seed_everything, seeded
from atoll.task.task import Task
from atoll.training.data.batches import to_device
from atoll.training.data.draws import Fetch, drawing, held_by, seed_held
from atoll.training.data.units import units_of
from atoll.training.local.client import TrainingClient
from atoll.training.local.fednova import Normalizer
from atoll.training.local.kept_optimizer import KeptOptimizer
from atoll.training.local.local_order import LocalOrder, draw_order
from atoll.training.local.scaffold import ControlVariates
from atoll.training.local.step import Descent, Step, make_optimizer, measured
from atoll.training.model.parameters import initial_parameters, load_parameters, trained_by_name, update_of
from atoll.training.private.local_steps import PrivateSteps, filled
from atoll.training.trials.contract import lone_row_refused, one_loss
from atoll.training.trials.same_form import SameForm
from atoll.training.trials.unit_check import check_of

__all__ = [
    "Work",
    "evaluate",
    "initial_parameters",
    "load_parameters",
    "make_optimizer",
    "seed_everything",
    "train_locally",
    "update_of",
]

RECENT_STEPS = 5
"""Number of last steps whose longest is the expected duration of the next step."""

COUNTED_AT_ONCE = 256
"""Number of examples whose units are counted in one call."""

EVALUATED_AT_ONCE = 256
"""Number of examples of one forward pass of an evaluation."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one local training."""

    num_examples: int | float
    """The weight in FedAvg, n_k > 0: the size of the data set, or its units if the task defines them (`Units.weight`);
    not the number of seen examples."""

    work: float
    """Steps done / steps requested, in (0, 1]."""

    statistics: Statistics
    """The statistics of the loss and the task's metrics over the trained batches, before each step; empty with
    `fit`."""

    steps: int
    """The number of optimizer steps done; 0 with `fit`, whose steps are not counted."""

    normalizer: Normalizer | None = None
    """The normalizer of FedNova over the steps; None with `fit`."""


@dataclass(frozen=True, slots=True)
class PrivateClient:
    """The client's part in a private training."""

    steps: PrivateSteps
    kept: KeptOptimizer | None = None
    """The optimizer's state that stays at the client."""


def train_locally(
    task: Task,
    model: torch.nn.Module,
    dataset: Any,
    local: Local,
    *,
    seed: int,
    deadline: Deadline | None = None,
    device: torch.device | str = "cpu",
    algorithm: ControlVariates | TrainingClient | KeptOptimizer | PrivateClient | None = None,
) -> Work:
    """Train the model in place: E epochs of mini-batches, or as many steps as fit before the deadline.

    The state of Python's, numpy's and torch's random generators is set from the seed and left where the training ends:
    this process belongs to the training. The same seed, data and number of threads give the same bits. Random numbers
    that the data set draws follow from (seed, epoch, index) alone (`draws`), except with `fit`. Each epoch has another
    order; the last short batch is kept (`batches.batch_sizes` has the one exception, for BatchNorm). `algorithm` is the
    client's part in the built-in loop: SCAFFOLD's control variates, the hooks of a custom algorithm, or the optimizer's
    state that stays at the client, or private steps, of which each has a Poisson sample of the examples and a noised
    gradient, and whose work tells nothing of the rows.

    Raises:
        TaskBroken: the data set is empty, or `fit` returns no work in (0, 1].
        OutOfTime: the deadline came before the first step.

    Source:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
        Algorithm 1, ClientUpdate. The deadline is ours.
    """
    deadline = deadline or Deadline.never()
    num_examples = len(dataset)
    if num_examples < 1:
        raise TaskBroken("the data set is empty; a site needs at least one example to train")
    seed_everything(seed)
    model.to(device).train()
    if task.fit is not None:
        form = SameForm(model)
        seed_held(held_by(dataset), f"{seed}")
        done = _fit(task.fit, model, dataset, local, deadline)
        if fault := form.left_by_fit():
            raise TaskBroken(fault)
        return Work(_weight(task, dataset), done, {}, 0)

    fetch, normalizer = drawing(dataset, seed), Normalizer(local)
    client = algorithm if isinstance(algorithm, TrainingClient) else None
    step = _step(task, model, local, algorithm)
    private = algorithm.steps if isinstance(algorithm, PrivateClient) else None
    if client is not None:
        client.begin()
    recent: deque[float] = deque([0.0], maxlen=RECENT_STEPS)
    done, order = 0, private or draw_order(num_examples, local, model)
    for number, indices in order.batches():
        if deadline.passed() or max(recent) > deadline.remaining():
            break
        began = deadline.now()
        with lone_row_refused():
            step(to_device(fetch(number, indices if private is None else filled(indices)), device), len(indices))
        step.wait()
        recent.append(deadline.now() - began)
        normalizer.step()
        done += 1
    if done == 0:
        raise OutOfTime(f"no time for the first of {count_of(order.steps, 'step')}")
    if client is not None:
        client.end()
    if not isinstance(order, LocalOrder):
        return Work(num_examples, done / order.steps, {}, done)
    weight = units_of(task).weight(step.units, order.sizes, num_examples)
    return Work(weight, done / order.steps, step.statistics(), done, normalizer)


def _step(
    task: Task,
    model: torch.nn.Module,
    local: Local,
    algorithm: ControlVariates | TrainingClient | KeptOptimizer | PrivateClient | None,
) -> Step:
    """Make the step of one client, and begin it."""
    descent = Descent(local, [p for p in model.parameters() if p.requires_grad])
    corrections: list[torch.Tensor | None] = []
    if isinstance(algorithm, ControlVariates) and algorithm.corrections:
        arrays = {id(p): algorithm.corrections.get(name) for name, p in trained_by_name(model).items()}
        found = [(p, arrays.get(id(p))) for p in descent.parameters]
        corrections = [None if array is None else torch.tensor(array).to(p) for p, array in found]
    client = algorithm if isinstance(algorithm, TrainingClient) else None
    private = algorithm if isinstance(algorithm, PrivateClient) else None
    step = Step(task, model, client, None if private is None else private.steps.gradients)
    step.begin(descent, corrections)
    if (kept := algorithm.kept if isinstance(algorithm, PrivateClient) else algorithm) and isinstance(
        kept, KeptOptimizer
    ):
        assert descent.optimizer is not None
        kept.begin(descent.optimizer, trained_by_name(model))
    return step


def evaluate(
    task: Task,
    model: torch.nn.Module,
    dataset: Any,
    *,
    batch_size: int = EVALUATED_AT_ONCE,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Statistics:
    """Return the statistics of the loss and the task's metrics over the whole data set, in eval mode.

    The model's draws depend on the seed alone, and the data set's are the same in every evaluation; the generators are
    restored.
    """
    evaluation = Evaluation(task, model.to(device).eval(), device=device)
    with seeded(seed):
        return evaluation(drawing(dataset, 0), len(dataset), batch_size=batch_size)


class Evaluation:
    """The evaluation of data sets in one model, which is in eval mode on its device.

    Args:
        task: the task of loss and metrics.
        model: the model.
        device: the device of the model.
    """

    def __init__(self, task: Task, model: torch.nn.Module, *, device: torch.device | str = "cpu") -> None:
        self._task, self._model, self._device, self._check = task, model, device, check_of(task)

    @torch.no_grad()
    def __call__(self, fetch: Fetch, num_examples: int, *, batch_size: int = EVALUATED_AT_ONCE) -> Statistics:
        """Return the statistics of a data set, with draws from the present state of the generators.

        Args:
            fetch: the function that fetches batches of the data set, from `drawing`.
            num_examples: the number of examples of the data set.
            batch_size: examples of one forward pass.
        """
        task = self._task
        sums: Statistics | None = None
        for indices in torch.split(torch.arange(num_examples), batch_size):
            if len(indices):  # an empty tensor splits into one empty batch
                inputs, targets = to_device(fetch(0, indices), self._device)
                outputs = self._model(inputs)
                self._check.see(outputs, targets)
                found = measured(task, outputs, targets)
                loss = one_loss(task.loss(outputs, targets))
                sums = add(sums or {}, _with_loss(found, task, loss, targets, len(indices)))
        if sums is None:
            return {} if "loss" in task.metrics else {"loss": (0.0, 0.0)}
        return sums


def _with_loss(measured: Statistics, task: Task, loss: torch.Tensor, targets: Any, num_examples: int) -> Statistics:
    """Return the sums of the metrics and, unless a metric has its name, of the loss."""
    statistics = dict(measured)
    if "loss" not in statistics:
        statistics |= as_statistics({"loss": units_of(task).sums(loss.item(), targets, num_examples)})
    return statistics


def _weight(task: Task, dataset: Any) -> int | float:
    """Return the weight in FedAvg of a site whose training reports no units, which are counted here."""
    units, num_examples = units_of(task), len(dataset)
    if units.function is None:
        return num_examples
    fetch, parts = drawing(dataset, 0), torch.split(torch.arange(num_examples), COUNTED_AT_ONCE)
    return units.weight([units(fetch(0, part)[1]) for part in parts], list(map(len, parts)), num_examples)


def _fit(fit: Any, model: torch.nn.Module, dataset: Any, local: Local, deadline: Deadline) -> float:
    if deadline.passed():
        raise OutOfTime("the deadline passed before the training began")
    work = fit(model, dataset, local, deadline)
    if not is_work(work):
        raise TaskBroken(f"fit must return the work done, a number in (0, 1], got {work!r}")
    return float(work)
