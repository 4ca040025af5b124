"""The effect of the batch size on digits: steps and examples to a target, noise scale, and sharpness of the minima.

For each batch size the digits task is trained on the pooled data of all its sites until the test accuracy first reaches
the target. The learning rate is tuned for each batch size on a grid, or scaled by a rule from the best rate of the base
batch; the momentum stays (Shallue et al. 2018 ask for all settings to be tuned anew). Then the smallest and the largest
batch are trained to the same training loss, and the sharpness of their minima is measured (Keskar et al. 2016). The
last line is the whole result as JSON.

    python -m examples.batch_size
    python -m examples.batch_size --batches 16,64,256 --target 0.95 --optimizer lars --rule linear
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.cli.printing import say, table
from atoll.training.optimizers.make import make_optimizer
from atoll.training.optimizers.noise_scale import NoiseScale, estimate
from atoll.training.optimizers.norms import total_norm
from atoll.training.optimizers.options import OPTIONS, OptimizerConfig
from atoll.training.optimizers.schedule import Schedule, scaled_lr
from examples import digits
from examples.teaching.critical_batch import fit_critical_batch
from examples.teaching.sharpness import sharpness

LIKELY = {"sgd": 0.02, "adam": 0.002, "adamw": 0.002, "lars": 2.0, "larc": 0.08, "lamb": 0.01, "novograd": 0.02}
"""A learning rate for each optimizer that is likely to be good with a batch of 8, in the middle of the grid."""

WARMUP_STEPS = 5
EPSILONS = (1e-3, 5e-4)
"""Sizes of the neighbourhoods in which the sharpness is measured."""

LOOK_EVERY = 10
"""Steps between two evaluations of the loss of all training examples."""


@dataclass(frozen=True, slots=True)
class Data:
    """The pooled training examples of all sites, and the server's test set."""

    images: Tensor
    digits: Tensor
    test_images: Tensor
    test_digits: Tensor


@dataclass(frozen=True, slots=True)
class Sweep:
    """The settings of the sweep, from the command line."""

    optimizer: str
    batches: tuple[int, ...]
    target: float
    rule: str
    base_batch: int
    max_epochs: int
    max_steps: int
    seeds: int
    train_loss: float

    @property
    def grid(self) -> tuple[float, ...]:
        """The learning rates to try."""
        return tuple(LIKELY[self.optimizer] * 2.0**power for power in range(-2, 6))


@dataclass(frozen=True, slots=True)
class Row:
    """The cost of reaching the target with one batch size at its best rate; None: it was never reached."""

    batch: int
    lr: float | None
    steps: float | None
    examples: float | None
    epochs: float | None


@dataclass(frozen=True, slots=True)
class Minimum:
    """The end of one training, with the sharpness of the minimum there."""

    trained: str
    """The kind of training, as in the table."""
    batch: int
    lr: float
    steps: int
    train_loss: float
    test_accuracy: float
    sharpness: tuple[float, ...]
    """The sharpness for each of EPSILONS."""


def load() -> Data:
    """Return the training splits of all sites, concatenated, and the server's test set."""
    sites = [digits.load_site(site, "train")[:] for site in digits.SITES]
    images, targets = (torch.cat(parts) for parts in zip(*sites, strict=True))
    return Data(images, targets, *digits.load_test()[:])


def train(data: Data, optimizer_name: str, batch: int, lr: float, seed: int) -> Iterator[nn.Module]:
    """Yield the model after each step, without end. Each epoch has a new order and drops an incomplete last batch."""
    torch.manual_seed(seed)
    model = digits.make_model()
    momentum = 0.9 if "momentum" in OPTIONS[optimizer_name] else None
    config = OptimizerConfig(name=optimizer_name, lr=lr, momentum=momentum, weight_decay=0.0)
    optimizer = make_optimizer(config, model.named_parameters())
    schedule = Schedule(lr=lr, steps=WARMUP_STEPS, warmup_steps=WARMUP_STEPS)
    orders = (torch.randperm(len(data.digits)) for _ in itertools.count())
    chosen = (order[i : i + batch] for order in orders for i in range(0, len(order) - batch + 1, batch))
    for step, indices in enumerate(chosen):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.images[indices]), data.digits[indices]).backward()
        optimizer.step()
        yield model


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Return the accuracy on the test set."""
    return float((model(data.test_images).argmax(dim=1) == data.test_digits).float().mean())


def steps_to_target(data: Data, sweep: Sweep, batch: int, lr: float, seed: int, limit: int) -> int | None:
    """Return the first evaluated step that meets the target; None: not by step `limit`.

    Every step is evaluated at first, later one each time that the number of steps has grown by 4 %.
    """
    evaluated = 0
    for step, model in enumerate(train(data, sweep.optimizer, batch, lr, seed), start=1):
        if step >= evaluated * 1.04 or step == limit:
            evaluated = step
            if accuracy(model, data) >= sweep.target:
                return step
        if step >= limit:
            return None
    return None


def best(data: Data, sweep: Sweep, batch: int, rates: Sequence[float]) -> Row:
    """Return the row of the rate with the fewest steps, by the median over the seeds.

    A training ends as soon as it has taken more steps than the best rate so far.
    """
    best_lr, needed = None, math.inf
    for lr in rates:
        limit = int(min(sweep.max_steps, sweep.max_epochs * len(data.digits) // batch, needed))
        runs = [steps_to_target(data, sweep, batch, lr, seed, limit) for seed in range(sweep.seeds)]
        median = statistics.median(math.inf if run is None else float(run) for run in runs)
        if median < needed:
            best_lr, needed = lr, median
    if best_lr is None:
        return Row(batch, None, None, None, None)
    return Row(batch, best_lr, needed, needed * batch, needed * batch / len(data.digits))


def run_sweep(data: Data, sweep: Sweep) -> list[Row]:
    """Return one row for each batch size.

    Raises:
        SystemExit: no rate reaches the target with the base batch of a scaling rule.
    """
    if sweep.rule == "tuned":
        return [best(data, sweep, batch, _likely_first(sweep, batch)) for batch in sweep.batches]
    base = best(data, sweep, sweep.base_batch, _likely_first(sweep, sweep.base_batch))
    if base.lr is None:
        raise SystemExit(
            f"no rate of {sweep.grid} reaches {sweep.target} with the base batch {sweep.base_batch}: lower --target, "
            "or raise --max-epochs or --max-steps"
        )
    scaled = {batch: scaled_lr(base.lr, batch, sweep.base_batch, sweep.rule) for batch in sweep.batches}
    return [best(data, sweep, batch, (lr,)) for batch, lr in scaled.items()]


def _likely_first(sweep: Sweep, batch: int) -> list[float]:
    """Return the grid from the likeliest rate outwards, so that the trainings with other rates end early."""
    likely = scaled_lr(LIKELY[sweep.optimizer], batch, 8, "sqrt")
    return sorted(sweep.grid, key=lambda lr: abs(math.log(lr / likely)))


def measure_noise(data: Data, sweep: Sweep, batch: int, lr: float, steps: int) -> dict[str, float | None]:
    """Return the noise scale B_simple of a training, in the first fifth of its steps, the last fifth, and all."""
    scales = {"first_fifth": NoiseScale(0.999), "last_fifth": NoiseScale(0.999), "all": NoiseScale(0.999)}
    generator = torch.Generator().manual_seed(0)
    for step, model in enumerate(itertools.islice(train(data, sweep.optimizer, batch, lr, seed=0), steps)):
        micro = torch.randperm(len(data.digits), generator=generator)[:256].view(16, 16)
        gradients = [_gradient(model, data, indices) for indices in micro]
        small = statistics.fmean(float(total_norm(gradient)) ** 2 for gradient in gradients)
        mean = [torch.stack(parts).mean(dim=0) for parts in zip(*gradients, strict=True)]
        found = estimate(small_batch=16, small_squared=small, big_batch=256, big_squared=float(total_norm(mean)) ** 2)
        scales["all"].add(found)
        if step < steps / 5:
            scales["first_fifth"].add(found)
        elif step >= steps * 4 / 5:
            scales["last_fifth"].add(found)
    return {part: scale.simple for part, scale in scales.items()}


def _gradient(model: nn.Module, data: Data, indices: Tensor) -> tuple[Tensor, ...]:
    loss = nn.functional.cross_entropy(model(data.images[indices]), data.digits[indices])
    return torch.autograd.grad(loss, list(model.parameters()))


def minimum(data: Data, sweep: Sweep, trained: str, batch: int, lr: float) -> Minimum:
    """Train to the training loss `sweep.train_loss`, for at most `sweep.max_steps`, and measure the sharpness there."""

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(data.images), data.digits)

    model = digits.make_model()
    for step, model in enumerate(train(data, sweep.optimizer, batch, lr, seed=0), start=1):  # noqa: B007
        if step >= sweep.max_steps or (step % LOOK_EVERY == 0 and loss().item() <= sweep.train_loss):
            break
    sharp = tuple(sharpness(loss, list(model.parameters()), epsilon=epsilon) for epsilon in EPSILONS)
    return Minimum(trained, batch, lr, step, loss().item(), accuracy(model, data), sharp)


def measure_minima(data: Data, sweep: Sweep, rows: list[Row]) -> list[Minimum]:
    """Return the minima of the smallest batch, and of the largest at its own rate and at that of the smallest."""
    reached = [(row.batch, row.lr) for row in rows if row.lr is not None]
    if len(reached) < 2:
        return []
    (small, small_lr), (large, large_lr) = reached[0], reached[-1]
    kinds = [("small batch", small, small_lr), ("large batch", large, large_lr)]
    if small_lr != large_lr:
        kinds.append(("large batch, the small one's rate", large, small_lr))
    return [minimum(data, sweep, trained, batch, lr) for trained, batch, lr in kinds]


def critical(rows: list[Row]) -> dict[str, Any]:
    """Return the fitted law of the critical batch size, or the reason why there is none."""
    try:
        law = fit_critical_batch({row.batch: row.steps for row in rows if row.steps is not None})
    except ValueError as error:
        return {"batch": None, "why": str(error)}
    return {"batch": law.batch, "min_steps": law.min_steps, "min_examples": law.min_examples}


def measure(sweep: Sweep) -> dict[str, Any]:
    """Measure everything, and return the result as the JSON has it."""
    began, data = time.monotonic(), load()
    if max(sweep.batches) > len(data.digits):
        raise SystemExit(
            f"--batches: {max(sweep.batches)} is more than the {len(data.digits)} training examples: leave it out"
        )
    rows = run_sweep(data, sweep)
    middle = next((row for row in rows if row.batch >= sweep.base_batch and row.lr is not None), None)
    noise: Mapping[str, float | None] = {}
    if middle is not None and middle.lr is not None and middle.steps is not None:
        noise = {"batch": middle.batch, **measure_noise(data, sweep, middle.batch, middle.lr, int(middle.steps))}
    return {
        "name": "batch_size",
        "settings": {**asdict(sweep), "momentum": 0.9, "grid": sweep.grid, "warmup_steps": WARMUP_STEPS},
        "examples": len(data.digits),
        "rows": [asdict(row) for row in rows],
        "critical": critical(rows),
        "noise_scale": noise,
        "minima": [asdict(one) for one in measure_minima(data, sweep, rows)],
        "epsilons": EPSILONS,
        "seconds": time.monotonic() - began,
    }


def show(result: dict[str, Any]) -> None:
    """Print the result as tables."""
    settings = result["settings"]
    say(f"{settings['optimizer']}, rate {settings['rule']} on {', '.join(f'{lr:g}' for lr in settings['grid'])}")
    say(f"{result['examples']} training examples; target: {settings['target']:.0%} of the test set\n")
    columns = ["batch", "lr", "steps", "examples", "epochs"]
    table(columns, ([row[column] for column in columns] for row in result["rows"]), empty="no batch sizes")
    found = result["critical"]
    if found["batch"] is None:
        say(f"\ncritical batch: none, {found['why']}")
    else:
        least = f"least steps {found['min_steps']:.3g}, least examples {found['min_examples']:.3g}"
        say(f"\ncritical batch: {found['batch']:.3g} ({least})")
    if noise := result["noise_scale"]:
        parts = ", ".join(f"{part.replace('_', ' ')} {_rounded(noise[part])}" for part in noise if part != "batch")
        say(f"gradient noise scale, trained with batch {noise['batch']}: {parts}\n")
    columns = ["trained", "batch", "lr", "steps", "train_loss", "test_accuracy"]
    heads = [*columns, *(f"sharpness({epsilon:g})" for epsilon in EPSILONS)]
    rows = ([*(one[column] for column in columns), *one["sharpness"]] for one in result["minima"])
    table(heads, rows, empty="no minima: fewer than two batch sizes reached the target")
    say(f"\n{result['seconds']:.0f} s\n")


def _rounded(scale: float | None) -> str:
    return "not positive" if scale is None else f"{scale:.3g}"


def main() -> None:
    """Read the command line, measure, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", default="16,32,64,128,256,512", help="batch sizes, separated by commas")
    parser.add_argument("--target", type=float, default=0.95, help="test accuracy to reach")
    parser.add_argument("--optimizer", choices=LIKELY, default="sgd", help="sgd, lars and larc with a momentum of 0.9")
    parser.add_argument("--rule", choices=["tuned", "linear", "sqrt"], default="tuned", help="choice of the rate")
    parser.add_argument("--base-batch", type=int, default=32, help="batch size whose best rate a rule scales")
    parser.add_argument("--max-epochs", type=int, default=100, help="largest number of epochs of one training")
    parser.add_argument("--max-steps", type=int, default=1500, help="largest number of steps of one training")
    parser.add_argument("--seeds", type=int, default=1, help="trainings for each rate, of which the median counts")
    parser.add_argument("--train-loss", type=float, default=0.02, help="training loss at which sharpness is measured")
    parser.add_argument("--json", action="store_true", help="print only the JSON")
    given = parser.parse_args()
    try:
        batches = tuple(sorted({int(batch) for batch in given.batches.split(",")}))
    except ValueError:
        parser.error(f"--batches: got {given.batches!r}; allowed: whole numbers separated by commas")
    if min(batches) < 1 or min(given.max_epochs, given.max_steps, given.seeds, given.base_batch) < 1:
        parser.error("batches, --base-batch, --max-epochs, --max-steps and --seeds must be at least 1")
    names = ("optimizer", "target", "rule", "base_batch", "max_epochs", "max_steps", "seeds", "train_loss")
    result = measure(Sweep(batches=batches, **{name: getattr(given, name) for name in names}))
    if not given.json:
        show(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
