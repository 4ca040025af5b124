"""The idle time of the ranks of a pipeline, against theory.

    python -m benchmarks.bubble [--pass-ms N] [--steps N]

Each rank sleeps for a fixed time in each forward pass, in each gradient of activations and in each gradient of weights,
so that two processors suffice for four ranks. The engine runs its own step through its own schedules: a rank is idle
while it waits for a message of another rank and, at the end, for the last rank to finish. The mean of the ranks is
compared with theory, for p ranks, m micro-batches and V stages of a rank:

    gpipe, 1f1b         (p - 1) / (m + p - 1)
    interleaved-1f1b    (p - 1) / (V m + p - 1)

Zero-bubble schedules are reported beside 1f1b's share, and must be below it. Sources: Huang et al., "GPipe", 2019,
section 2.3; Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, section 2.2; Qi et al., "Zero
Bubble Pipeline Parallelism", 2023.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules

from atoll.parallel.data.batch import Batch
from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from benchmarks.report import Bar, conclude, say
from tests.parallel.forked import run_ranks

ZERO_BUBBLE = ("interleaved-zero-bubble", "zbv-zero-bubble")
FEATURES = 4


class Slept(torch.autograd.Function):
    """The identity, whose passes take a fixed time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        """Sleep for `forward_s`; the backward pass sleeps for `backward_s`."""
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sleep, and pass the gradient on."""
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Stage(nn.Module):
    """A linear stage x W, where each of the three passes takes `pass_s`."""

    def __init__(self, pass_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(FEATURES))
        self.pass_s = pass_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W: (rows, features) -> (rows, features)."""
        weight = Slept.apply(self.weight, 0.0, self.pass_s)  # type: ignore[no-untyped-call]
        slept: torch.Tensor = Slept.apply(x, self.pass_s, self.pass_s if x.requires_grad else 0.0)  # type: ignore[no-untyped-call]
        if not x.requires_grad:  # the first stage has no gradient of its inputs, but takes the time of one
            weight = Slept.apply(weight, 0.0, self.pass_s)  # type: ignore[no-untyped-call]
        return slept @ weight


class Waiting:
    """The total time in which torch's schedules wait for other ranks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._wait = schedules._wait_batch_p2p

    def __call__(self, works: Any) -> None:
        """Wait in place of torch's own function, and add the time."""
        began = time.perf_counter()
        self._wait(works)
        self.seconds += time.perf_counter() - began

    def barrier(self) -> None:
        """Wait for all ranks, and add the time."""
        began = time.perf_counter()
        dist.barrier()
        self.seconds += time.perf_counter() - began


def idle_share(plan: Plan, pass_s: float, steps: int) -> float:
    """Return the median share of a step in which this rank waits; the first step does not count."""
    axes = Axes(plan.mesh, "cpu")
    model = nn.Sequential(*(Stage(pass_s) for _ in range(plan.num_stages)))
    engine = assemble(
        model,
        plan,
        Optimization(
            loss=lambda outputs, _targets: outputs.mean(),
            make_optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0),
        ),
        axes=axes,
    )
    rows = plan.microbatches
    batch = Batch(torch.ones(rows, FEATURES), torch.zeros(rows), rows)
    shares = []
    for _ in range(steps + 1):
        waiting = Waiting()
        dist.barrier()
        with patch.object(schedules, "_wait_batch_p2p", waiting):
            began = time.perf_counter()
            engine.step(batch, total=rows, report=False)
            waiting.barrier()
            shares.append(waiting.seconds / (time.perf_counter() - began))
    return median(shares[1:])


def shares_of(plans: list[Plan], pass_s: float, steps: int) -> list[float]:
    """Return the idle share of each plan, in one set of ranks."""
    torch.set_num_threads(1)
    return [idle_share(plan, pass_s / plan.stages, steps) for plan in plans]


def theory(plan: Plan) -> float:
    p, m, v = plan.mesh.pp, plan.microbatches, plan.stages
    return (p - 1) / (v * m + p - 1)


def plans_of(p: int) -> list[Plan]:
    """Return every schedule with the numbers of micro-batches from 1 to 16 that it allows."""
    mesh = Mesh(pp=p)
    found = [Plan(mesh=mesh, schedule="gpipe", num_microbatches=m) for m in range(1, 17)]
    found += [Plan(mesh=mesh, schedule="1f1b", num_microbatches=m) for m in range(p, 17)]
    for schedule in ("interleaved-1f1b", *ZERO_BUBBLE):
        found += [Plan(mesh=mesh, schedule=schedule, num_microbatches=m) for m in range(p, 17, p)]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pass-ms", type=float, default=50.0, help="milliseconds of a pass of a micro-batch")
    parser.add_argument("--steps", type=int, default=1)
    given = parser.parse_args(arguments)
    pass_s = given.pass_ms / 1e3
    rows, worst, zero_bubble = [], 0.0, 0.0
    for p in (2, 4):
        plans = plans_of(p)
        found = run_ranks(shares_of, p, plans, pass_s, given.steps, timeout_s=900)
        for plan, shares in zip(plans, zip(*found, strict=True), strict=True):
            idle, expected = mean(shares), theory(plan)
            rows.append({"p": p, "m": plan.microbatches, "schedule": plan.schedule, "idle": idle, "theory": expected})
            say(f"p={p} m={plan.microbatches:<2} {plan.schedule:<24} idle {idle:6.1%}  theory {expected:6.1%}")
            if plan.schedule in ZERO_BUBBLE:
                zero_bubble = max(zero_bubble, idle - (p - 1) / (plan.microbatches + p - 1))
            else:
                worst = max(worst, abs(idle - expected))
    bars = [
        Bar.at_most("largest difference of the idle share from theory", worst, 0.02),
        Bar.at_most("idle share of zero-bubble schedules beyond that of 1f1b", zero_bubble, 0.0),
    ]
    ours = {"pass_ms": given.pass_ms, "steps": given.steps, "shares": [_rounded(row) for row in rows]}
    return conclude("bubble", bars, ours=ours, theirs={"theory": "the formulas of the docstring"})


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


if __name__ == "__main__":
    raise SystemExit(main())
