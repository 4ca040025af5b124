"""The private steps of one client's training in a federation: its terms, its samples, and its gradients.

The terms come from the run, and the secret from the site: samples and noise of a training follow from a key that the
agent derives from its own secret, the run, the round and all else that the update depends on. So a training that is
repeated after a kill gives the same bits, and neither the coordinator nor a seed predicts them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from atoll.ground.faults import Refused
from atoll.ground.noise.key import BYTES, key_of
from atoll.ground.printable import count_of
from atoll.task.errors import TaskBroken
from atoll.task.given import Given
from atoll.task.local import Local, epoch_steps
from atoll.task.task import Task
from atoll.tensors.secure.vector import VALUE_BITS, clip_steps
from atoll.training.private.captured_gradients import CapturedGradients
from atoll.training.private.checks import Engine, choose, delta_fault, model_faults, trial_of
from atoll.training.private.config import PrivacyConfig
from atoll.training.private.noised_gradients import ROWS_AT_ONCE, NoisedGradients
from atoll.training.private.sampler import PoissonSampler

OF_THE_RUN = ("participations_max",)
"""Terms that concern the run's account alone."""
OF_SHARES = ("noise_by", "batch", "bits")
"""Terms of steps to whose sum the clients add the noise."""

ROUNDING = 1 / 64
"""Part of the clip norm that rounding may take of a step with shared noise: its examples are clipped to the rest."""

_WITH = 'with privacy.unit = "example"'


@dataclass(frozen=True, slots=True)
class PrivateTerms:
    """The mechanism of a run's private steps."""

    sample_rate: float
    clip_norm: float
    noise_multiplier: float
    delta: float
    batch: float = 0.0
    """Divisor of a step's sum if the clients add the noise in their secure sum; 0: the site adds it to its steps."""
    bits: Literal[32, 64] = 32
    """Bits of a word of that sum."""

    @property
    def example_norm(self) -> float:
        """The norm to which an example's gradient is clipped: with shared noise there is room for rounding."""
        return self.clip_norm * (1.0 - ROUNDING) if self.batch else self.clip_norm

    @property
    def std(self) -> float:
        """Standard deviation of the noise that the site adds to the sum of a step."""
        return 0.0 if self.batch else self.noise_multiplier * self.clip_norm

    def divisor(self, num_examples: int) -> float:
        """Return the number by which the sum of a step is divided: the expected examples, or those of the run."""
        return self.batch or self.sample_rate * num_examples

    def rounding_fault(self, parameters: Iterable[torch.Tensor]) -> str:
        """Return why rounding takes too much of a step with shared noise; empty: it does not.

        An example moves the sum of a step, over the batch B, by C / B at most, and the noise is for that. It is clipped
        to less, as the update is rounded twice on its way into the sum: to a difference of two models, and to the
        sum's steps, each time by at most half a step of each value, with the example and without it.

        Args:
            parameters: the trained ones, with the values that the training begins with.
        """
        if not self.batch:
            return ""
        count, squares = 0, 0.0
        for each in parameters:
            norm = float(each.detach().double().norm()) + self.clip_norm
            count, squares = count + each.numel(), squares + (norm * torch.finfo(each.dtype).eps) ** 2
        step = self.clip_norm / clip_steps(self.bits)
        taken = self.batch * (step * math.sqrt(count) + 2.0 * math.sqrt(squares)) / self.clip_norm
        if taken <= ROUNDING:
            return ""
        out = "a smaller privacy.batch" if self.bits == 64 else "secure.bits = 64, or a smaller privacy.batch"
        return (
            f"privacy.batch: got {self.batch:g}: rounding {count_of(count, 'number')} takes {taken:.2g} of what one "
            f"example adds, and allowed is {ROUNDING:.2g}: {out}"
        )

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "PrivateTerms | None":
        """Parse the terms that a run gives to its task (`Given.private`); None: there are none.

        Raises:
            OverridesRefused, ValueError: they are no terms of private steps; the message lists all faults.
        """
        if not given:
            return None
        left_out = (*OF_THE_RUN, *OF_SHARES)
        settings = PrivacyConfig().with_overrides({k: v for k, v in given.items() if k not in left_out})
        if settings.noise_multiplier is None:
            raise ValueError("privacy.noise_multiplier: missing: a run names the noise of its steps")
        assert settings.sample_rate is not None
        assert settings.clip_norm is not None
        assert settings.delta is not None
        terms = cls(settings.sample_rate, settings.clip_norm, settings.noise_multiplier, settings.delta)
        return replace(terms, **_shares_of(given)) if given.get("noise_by", "site") != "site" else terms

    def steps_of(self, local: Local) -> int:
        """Return the number of steps of one training: epochs of 1 / q steps, at most `max_steps`."""
        steps = local.epochs * epoch_steps(self.sample_rate)
        return min(steps, local.max_steps or steps)


def _shares_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms of steps to whose sum the clients add the noise.

    Raises:
        ValueError: they are no such terms; the message lists all faults.
    """
    party, batch, bits = (given.get(name) for name in OF_SHARES)
    faults = []
    if party != "clients":
        faults.append(f'privacy.noise_by: got {party!r}: allowed are "site", "clients"')
    if not isinstance(batch, int | float) or isinstance(batch, bool) or not 0.0 < batch <= 1e9:
        faults.append(f"privacy.batch: got {batch!r}: allowed is a number above 0, at most 1e9")
    if type(bits) is not int or bits not in VALUE_BITS:
        faults.append(f"secure.bits: got {bits!r}: allowed are 32, 64")
    if faults:
        raise Refused(*faults)
    return {"batch": float(batch), "bits": bits}  # type: ignore[arg-type]


def check_terms(given: Given, task: Task, algorithm: str) -> PrivateTerms | None:
    """Check that a task trains by the built-in loop alone, and return a run's terms of private steps.

    Returns:
        None: the run has no guarantee for examples.

    Raises:
        TaskBroken: it trains otherwise; the message lists every reason.
        OverridesRefused, ValueError: as in `PrivateTerms.read`.
    """
    if not given.private:
        return None
    if faults := [*_faults(given, task, algorithm)]:
        raise TaskBroken(*faults)
    return PrivateTerms.read(given.private)


def check_model(model: torch.nn.Module) -> None:
    """Check that no layer of a model mixes rows in training mode, before there is data.

    Raises:
        TaskBroken: some do; the message lists them.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        faults = [*model_faults(model.train())]
    finally:
        for module, mode in modes:
            module.training = mode
    if faults:
        raise TaskBroken(*faults)


def _faults(given: Given, task: Task, algorithm: str) -> Iterator[str]:
    if task.fit is not None:
        yield (
            f"task.fit: {_WITH} its gradients are not of single examples: allowed is the built-in loop, or "
            'privacy.unit = "client"'
        )
    if task.algorithm is not None:
        yield f"task.algorithm: {_WITH} its hooks see batches without noise: allowed is a task without one"
    if algorithm != "fedavg":
        yield f"algorithm: got {algorithm!r}: {_WITH} its corrections have no noise: allowed are fedavg, fedprox"
    if given.is_shared and (kept := task.local.with_overrides(given.local).keep):
        yield (
            f"local.keep: got {kept!r}: {_WITH} and noise by the clients layers that a site keeps have no noise, and "
            'its next sums would tell of them: allowed is none, or privacy.noise_by = "site"'
        )


@dataclass(frozen=True, slots=True)
class Draws:
    """The secret draws of one training's steps: their samples, and the key of their noise."""

    sampler: PoissonSampler
    noise: bytes

    @classmethod
    def of(cls, key: bytes, num_examples: int, sample_rate: float) -> "Draws":
        """Return the draws of a training on a number of examples, from its key of 32 bytes."""
        of_data = key_of(key, "private steps", num_examples)
        sampler = PoissonSampler(key_of(of_data, "samples"), num_examples, sample_rate)
        return cls(sampler, key_of(of_data, "noise"))


class PrivateSteps:
    """The private steps of one training.

    Args:
        terms: the mechanism.
        task: the task.
        model: the model, in training mode on its device.
        data: the site's training data.
        local: the settings of the round.
        key: 32 bytes, secret, of this training alone.
        seed: the public seed of the training, for the draws of the data set.
        gradients: from an earlier training of the same model; None: the model is tried now (`try_gradients`).

    Raises:
        TaskBroken: rows have no gradients of their own, or delta is too large for the site; all faults.
    """

    def __init__(
        self,
        terms: PrivateTerms,
        task: Task,
        model: torch.nn.Module,
        data: Any,
        local: Local,
        *,
        key: bytes,
        seed: int,
        gradients: Engine | None = None,
    ) -> None:
        count = len(data)
        if count < 1:
            raise TaskBroken("the data set is empty; a site needs at least one example to train")
        if gradients is not None and (fault := delta_fault(terms.delta, count)):
            raise TaskBroken(fault)
        self.engine = gradients or try_gradients(
            task, model, data, seed, clip_norm=terms.example_norm, delta=terms.delta
        )
        if fault := terms.rounding_fault(self.engine.parameters.values()):
            raise TaskBroken(fault)
        self.steps, self._epoch = terms.steps_of(local), epoch_steps(terms.sample_rate)
        draws = Draws.of(key, count, terms.sample_rate)
        self._sampler = draws.sampler
        self.gradients = NoisedGradients(
            self.engine,
            key=draws.noise,
            std=terms.std,
            expected=terms.divisor(count),
            at_once=local.batch_size or ROWS_AT_ONCE,
        )

    def batches(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the epoch of each step, and the examples of its sample (B,) int64, perhaps none."""
        for step in range(self.steps):
            yield step // self._epoch, torch.from_numpy(self._sampler.indices(step))


def training_key(request: Mapping[str, Any]) -> bytes:
    """Return the key that the agent has derived for a training.

    A simulation has no secret and no fresh bytes: each repetition has the same bits, and protects nothing.
    """
    key = request.get("noise")
    return bytes.fromhex(key) if key else key_of(bytes(BYTES), "simulation", request["seed"])


FILLER = torch.zeros(1, dtype=torch.int64)
"""The example that stands for an empty sample, and counts for nothing."""


def filled(indices: torch.Tensor) -> torch.Tensor:
    """Return the examples to fetch for a sample: without any a filler."""
    return indices if len(indices) else FILLER


ELSEWHERE = (
    "on a mesh, in half precision or with recomputation gradients of single rows come from what each layer takes and "
    "gives back: use each trained weight in its layer's call alone, or train in one process in fp32"
)
"""The way out of a layer whose example gradients one process can compute."""


def try_gradients(
    task: Task,
    model: torch.nn.Module,
    data: Any,
    seed: int,
    *,
    clip_norm: float,
    delta: float,
    is_captured: bool = False,
) -> Engine:
    """Try a model in training mode on a few rows of its data, and return the way to its example gradients.

    Args:
        task: its task.
        model: the model.
        data: of which a few rows are read.
        seed: of the data's draws.
        clip_norm: C.
        delta: of the guarantee.
        is_captured: allow what layers take and give back alone (`captured_gradients`), as on a mesh.

    Raises:
        TaskBroken: rows have no gradients of their own, or delta is too large for the data; all faults.
    """
    trial = trial_of(task, model, data, seed, next(model.parameters()).device)
    gradients, faults = choose(trial, clip_norm)
    if is_captured and gradients is not None and not isinstance(gradients, CapturedGradients):
        gradients, faults = choose(trial, clip_norm, ways=(CapturedGradients,))
        faults = [f"{fault}; {ELSEWHERE}" for fault in faults]
    if fault := delta_fault(delta, len(data)):
        faults.append(fault)
    if faults or gradients is None:
        raise TaskBroken(*faults)
    return gradients
