"""The trainer of many clients whose steps are private: each has the samples and the noise that it has alone.

Samples and noise come from each client's key, bit for bit as in `training/private/local_steps`; only the clipped sums
of all clients are computed at once, and agree with a client alone to rounding. Before the first round, a few clients'
sums are computed both ways.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from atoll.simulations.engines.batched.concatenation import of_one_kind
from atoll.simulations.engines.batched.mapped_client import SharedContext
from atoll.simulations.engines.batched.measures import Measured
from atoll.simulations.engines.batched.nets import load_untrained
from atoll.simulations.engines.batched.private_sums import BY_ROW, KINDS, ClientSums
from atoll.simulations.engines.batched.schedule import Batch
from atoll.simulations.engines.batched.shared import Running
from atoll.simulations.engines.batched.stack import CannotBatch, Stack
from atoll.simulations.engines.batched.trainer import ACTIVATION_BYTES, BatchTrainer, Steps
from atoll.simulations.engines.engine import Job, Training
from atoll.simulations.engines.examples import Examples
from atoll.task.arrays import Arrays
from atoll.task.context import within
from atoll.task.errors import TaskBroken
from atoll.task.given import Given
from atoll.task.randomness import generators_kept
from atoll.training.data.units import units_of
from atoll.training.model.parameters import build_model
from atoll.training.private.checks import FEW, Engine, Trial, choose, delta_fault
from atoll.training.private.example_gradients import Gradients
from atoll.training.private.local_steps import Draws, PrivateTerms, training_key
from atoll.training.private.noise import add_noise_of_each

TRIED = 4
"""Number of clients whose sums are computed both as one group and alone."""

TOLERANCE = 1e-4
"""Largest difference of a sum, in the clip norm, that counts as rounding; see `training/private/checks`."""

SPREAD = 0.1
"""Standard deviation of what a tried client's weights have beside the version's, relative to each of them."""


class PrivateTrainer(BatchTrainer):
    """Trainer of windows in groups of clients, each with its Poisson samples and its noise.

    Args:
        training: the settings of all clients' training, with terms of private steps.
        at_once: the number of clients in a group (k); None: as many as fit into the cache.
        kind: the way to the clipped sums; None: the first one that agrees with a client alone.

    Raises:
        CannotBatch: no way supports the model; the message lists each one's reason.
    """

    def __init__(self, training: Training, *, at_once: int | None = None, kind: str | None = None) -> None:
        terms = PrivateTerms.read(Given.read(training.overrides).private)
        assert terms is not None
        self._terms, self._rounding_fault = terms, ""
        super().__init__(training, at_once=at_once, kind=kind)

    # ------------------------------------------------------------ the choice

    def _choose(self) -> None:
        sites = self._task.sites[:TRIED]
        every = [self._loop.examples(site) for site in sites]
        chosen = of_one_kind(every)
        if not chosen:
            raise CannotBatch("the task names no sites with examples in tensors to try it with")
        context = SharedContext(self._task, Job(sites[chosen[0]], 0))
        with generators_kept(), within(context) if self._has_context else nullcontext():
            self._choose_by([every[index] for index in chosen])

    def _choose_by(self, examples: Sequence[Examples]) -> None:
        """Switch to the first way to the sums that agrees with the gradients of each client alone."""
        model = build_model(self._task, self._training.model_seed).to(self._training.device).train()
        few = [_few(each) for each in examples]
        inputs, targets = few[0]
        trial = Trial(
            model=model,
            loss=self._task.loss,
            units=units_of(self._task),
            inputs=inputs,
            targets=targets,
            rows=len(inputs),
        )
        alone, faults = choose(trial, self._terms.example_norm)
        if alone is None:
            raise CannotBatch("; ".join(faults))
        reasons = []
        for kind in KINDS:
            try:
                self.take(kind)
                self._check(alone, few)
                return
            except Exception as error:  # any: the task's code in torch.func
                reasons.append(f"{kind}: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
        raise CannotBatch("; ".join(reasons))

    def _check(self, alone: Engine, few: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Compare the sums of clients with different weights and samples with the sums of each alone.

        Raises:
            CannotBatch: some differ.
        """
        generator = torch.Generator().manual_seed(1)
        first = {name: p.detach().clone() for name, p in alone.parameters.items()}
        values = [
            {name: p * (1 + SPREAD * torch.randn(p.shape, generator=generator).to(p)) for name, p in first.items()}
            for _ in few
        ]
        sizes = [max(0, len(inputs) - number) for number, (inputs, _) in enumerate(few)]
        inputs, targets = (torch.stack([_padded(pair[at]) for pair in few]) for at in (0, 1))
        is_real = torch.arange(inputs.shape[1]) < torch.tensor(sizes)[:, None]
        together = {name: torch.stack([each[name] for each in values]) for name in first}
        found = self._private.sums.sums(together, inputs, targets, is_real.to(inputs.device))
        for client, (own, (inputs, targets), size) in enumerate(zip(values, few, sizes, strict=True)):
            with torch.no_grad():
                for name, parameter in alone.parameters.items():
                    parameter.copy_(own[name])
            expected = alone.clipped_sum(inputs[:size], targets[:size], size)
            for name, each in expected.items():
                difference = float((found[name][client] - each).abs().max()) if each.numel() else 0.0
                if not difference <= TOLERANCE * self._terms.clip_norm:
                    raise CannotBatch(f"{name}: the sum of a client in a group is {difference:.1e} off the one alone")

    def take(self, kind: str) -> None:
        """Switch to a way to the sums; raise CannotBatch if it does not support the model."""
        self.at_once = self._wanted or self._fitting(kind)
        model = build_model(self._task, self._training.model_seed).to(self._training.device).train()
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        if others := sorted(trained.symmetric_difference(name for name, _, _ in self._places)):
            raise CannotBatch(f"{', '.join(others)}: a trained parameter that is not exchanged")
        stack = Stack(self._local, self._places, self.at_once, self._training.device)
        sums = KINDS[kind](model, self._task.loss, self._terms.example_norm)
        self._net = self._private = PrivateNet(sums, model, stack)
        self.kind = kind

    # ------------------------------------------------------------ the steps

    def begin(self, version: Arrays, number: int = 0) -> None:
        """Set the version that the next clients train from."""
        super().begin(version, number)
        trained = (torch.from_numpy(self._version[name]) for name, _, _ in self._places if name in self._version)
        self._rounding_fault = self._terms.rounding_fault(trained)

    def _examples_of(self, job: Job) -> Examples:
        examples = super()._examples_of(job)
        if fault := delta_fault(self._terms.delta, examples.count) or self._rounding_fault:
            raise TaskBroken(fault)
        return examples

    def _schedule(self, jobs: Sequence[Job], placed: Sequence[Examples], offsets: Sequence[int]) -> Steps:
        return PrivateSchedule(jobs, placed, self._terms, self._terms.steps_of(self._local), offsets)

    def _run(self, schedule: Steps, tensors: tuple[torch.Tensor, ...], clients: int) -> Measured | None:
        assert isinstance(schedule, PrivateSchedule)
        net, terms, active = self._private, self._terms, 0
        for step, batch in enumerate(schedule):
            draws = schedule.draws[: len(batch.sizes)]
            if active != len(draws):
                active = len(draws)
                net.stack.take(active)
            rows = batch.rows.to(self._training.device)
            inputs, targets = (each[rows] for each in tensors)
            is_real = torch.arange(rows.shape[1]) < torch.from_numpy(batch.sizes)[:, None]
            sums = net.sums.sums(net.stack.weights, inputs, targets, is_real.to(rows.device))
            if terms.std:  # else the clients add it to the sum of their updates
                add_noise_of_each(sums, [each.noise for each in draws], step, terms.std)
            net.descend(sums, torch.tensor(schedule.divisors[: len(draws)], dtype=torch.float64))
        return None

    def _num_steps(self, job: Job, examples: Examples) -> int:
        requested: int = self._terms.steps_of(self._local)
        return min(requested, job.steps or requested)

    def _width(self, examples: Examples) -> int:
        """Return the size that hardly any sample of a client exceeds."""
        expected = self._terms.sample_rate * examples.count
        return max(1, min(examples.count, round(expected + 2 * math.sqrt(expected))))

    def _fitting(self, kind: str) -> int:
        """Return the number of clients in a group that fit into the cache."""
        fitting: int = super()._fitting(kind)
        if kind != BY_ROW or (site := next(iter(self._task.sites), None)) is None:
            return fitting
        return max(1, min(fitting, ACTIVATION_BYTES // (self._row_bytes() * self._width(self._loop.examples(site)))))


class PrivateNet:
    """The model of a group, with the clients' weights.

    Args:
        sums: the clipped sums.
        model: the model of these, whose tensors that are not trained belong to all clients.
        stack: the weights.
    """

    def __init__(self, sums: ClientSums, model: torch.nn.Module, stack: Stack) -> None:
        self.sums, self.stack, self._model = sums, stack, model
        self.running = Running({}, stack.count, stack.device)
        """The buffers of batch norms: private steps have none."""

    def load(self, version: Arrays) -> None:
        """Load the tensors of a version that are not trained: buffers, frozen layers."""
        load_untrained(self._model, version, self.stack.blocks.keys())

    def begin(self, start: torch.Tensor, corrections: torch.Tensor | None, *, clients: int, length: int) -> None:
        """Set the weights of a new group of clients; see `Stack.begin`."""
        self.stack.begin(start, corrections, clients=clients, length=length)

    def descend(self, sums: Gradients, divisors: torch.Tensor) -> None:
        """Make a step of all clients with the sums over their divisors (m,)."""
        for name, each in sums.items():
            of_each = divisors.to(each.device).view(-1, *(1 for _ in each.shape[1:]))
            self.stack.put(name, (each / of_each).to(self.stack.weights[name].dtype))
        self.stack.step()


class PrivateSchedule:
    """The Poisson samples of several clients: in each step the ones that each draws alone.

    Args:
        jobs: the jobs of the clients.
        examples: the examples of each client.
        terms: the mechanism.
        requested: the steps of a training without a deadline.
        offsets: the offset of each client's examples in the tensors that contain all examples.
    """

    length = 0
    """No layer's weights are stored as factors."""

    def __init__(
        self,
        jobs: Sequence[Job],
        examples: Sequence[Examples],
        terms: PrivateTerms,
        requested: int,
        offsets: Sequence[int],
    ) -> None:
        self.requested = [requested] * len(jobs)
        self.steps = [min(requested, job.steps or requested) for job in jobs]
        self.order = sorted(range(len(jobs)), key=lambda index: -self.steps[index])
        """The index of the job of each row."""
        self._chosen = [examples[index] for index in self.order]
        self._offsets = [offsets[index] for index in self.order]
        self.draws = [
            Draws.of(training_key({"seed": jobs[index].seed}), examples[index].count, terms.sample_rate)
            for index in self.order
        ]
        self.divisors = [terms.divisor(each.count) for each in self._chosen]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the samples of all steps, each client's rows beyond its sample being those of any example."""
        for step in range(max(self.steps)):
            found = [
                self._rows(index, step) for index, job in enumerate(self.order) if self.steps[job] > step
            ]  # the first clients: those with the most steps
            sizes = np.array([len(each) for each in found], np.int64)
            rows = torch.zeros(len(found), int(sizes.max()), dtype=torch.int64)
            for row, each in zip(rows, found, strict=True):
                row[: len(each)] = each
            yield Batch(rows, sizes)

    def _rows(self, index: int, step: int) -> torch.Tensor:
        positions = torch.from_numpy(self.draws[index].sampler.indices(step))
        return self._chosen[index].rows(positions).cpu() + self._offsets[index]


def _few(examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of a few of a client's examples, at least one."""
    count = min(examples.count, FEW)
    rows = examples.rows(torch.arange(count) * examples.count // count)
    inputs, targets = (each[rows] for each in examples.tensors or ())
    return inputs, targets


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Return `FEW` rows: the last one again."""
    return torch.cat([rows, rows[-1:].expand(FEW - len(rows), *rows.shape[1:])])
