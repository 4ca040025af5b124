"""Random models on random meshes: what the formulas say against what the engine does in a dry run.

`python -m tests.parallel.planner.dry_runs 50` runs that many and prints a line for each.
"""

import random
import sys

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import SCHEDULES, Plan
from atoll.parallel.planner.candidate import Candidate
from atoll.parallel.planner.dry_run import DryRun, apart
from atoll.parallel.planner.memory import memory
from atoll.parallel.planner.shape import ModelShape
from atoll.parallel.planner.traffic import totals

Case = tuple[ModelShape, Candidate, int]


def case(seed: int) -> Case:
    """A small decoder, a plan of up to 64 ranks that the engine takes, and one of the ranks."""
    draw = random.Random(seed)
    while True:
        try:
            return _drawn(draw)
        except ValueError:  # the plan has parts that do not go together: another one
            continue


def _drawn(draw: random.Random) -> Case:
    mesh = Mesh(
        pp=draw.choice((1, 1, 2, 3, 4)),
        dp_replicate=draw.choice((1, 1, 2, 3)),
        dp_shard=draw.choice((1, 2, 3, 4)),
        tp=draw.choice((1, 1, 2, 4)),
    )
    schedule = draw.choice(tuple(SCHEDULES)) if mesh.pp > 1 else "1f1b"
    stages_per_rank = SCHEDULES[schedule][1]
    plan = Plan(
        mesh=mesh,
        zero=draw.choice((None, 1, 2, 3)),
        schedule=schedule,
        accumulate=draw.choice((1, 2, 3)) if mesh.pp == 1 else 1,
        num_microbatches=mesh.pp * stages_per_rank * draw.choice((1, 2)) if mesh.pp > 1 else None,
        sequence_parallel=draw.random() < 0.7,
        loss_parallel=mesh.tp > 1 and draw.random() < 0.5,
        precision=draw.choice(("fp32", "bf16")),
        reduce_dtype=draw.choice(("fp32", "fp32", "bf16")),
        recompute=draw.choice(("none", "none", "full", "selective")),
    )
    if mesh.size > 64 or plan.is_ddp:
        raise ValueError("not for a dry run")
    heads = draw.choice((4, 8))
    shape = ModelShape(
        layers=max(mesh.pp * stages_per_rank, draw.randint(1, 6)),
        hidden=heads * draw.choice((4, 10, 16)),
        heads=heads,
        kv_heads=4,
        ffn=4 * draw.randint(8, 40),
        vocab=4 * draw.randint(10, 60),
        sequence=4 * draw.randint(2, 8),
        tied=draw.random() < 0.3,
    )
    optimizer = draw.choice(("adamw", "adamw", "sgd", "momentum"))
    candidate = Candidate(plan=plan, microbatch=draw.randint(1, 3), optimizer=optimizer)
    return shape, candidate, draw.randrange(mesh.size)


def differences(shape: ModelShape, candidate: Candidate, run: DryRun) -> list[str]:
    """Return where the prediction is not exactly the measurement."""
    expected = memory(shape, candidate, run.rank)
    found = [
        f"{name}: measured {getattr(run, name)}, predicted {getattr(expected, name)}"
        for name in ("parameters", "gradients", "optimizer")
        if getattr(run, name) != getattr(expected, name)
    ]
    counted, said = run.counted(), totals(shape, candidate, run.rank)
    found += [
        f"{key}: measured {counted.get(key)}, predicted {said.get(key)}"
        for key in sorted(counted.keys() | said.keys())
        if counted.get(key) != said.get(key)
    ]
    return found


def main(number: int) -> int:
    """Print how many of `number` cases differ."""
    failed = 0
    for seed in range(number):
        shape, candidate, rank = case(seed)
        run = apart(shape, candidate, rank)
        found = differences(shape, candidate, run)
        failed += bool(found)
        ratio = memory(shape, candidate, rank).total / run.peak
        plan = candidate.plan
        words = (
            f"{plan.mesh} of {plan.mesh.size}, rank {rank}, zero {plan.zero_stage}, {plan.schedule}, {plan.precision}"
        )
        sys.stdout.write(f"{seed}: {words}: {'; '.join(found) or 'equal'}; peak predicted / measured {ratio:.2f}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{number - failed} of {number} equal\n")
    return failed


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
