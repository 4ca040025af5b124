"""The dry runs of `atoll plan`: a step of the engine on meta tensors, beside the prediction."""

import dataclasses
from typing import TYPE_CHECKING, Any

from atoll.aggregation.printable import count_of, printable_size
from atoll.cli.faults import CommandError
from atoll.cli.printing import note, say, table
from atoll.cli.waiting import waiting_for

if TYPE_CHECKING:
    from atoll.parallel.planner.candidate import Candidate
    from atoll.parallel.planner.dry_run import DryRun
    from atoll.parallel.planner.shape import ModelShape


def dry_runs(
    shape: "ModelShape", candidate: "Candidate", ranks: list[int]
) -> "list[tuple[int, DryRun, ModelShape, Candidate]]":
    """Return the dry run of each rank, with the model and the candidate that it was made for."""
    found = []
    with waiting_for(
        "the dry runs", f"a step of {count_of(len(ranks), 'rank')}, without memory for its tensors"
    ) as wait:
        for rank in ranks:
            found.append((rank, *_dry_run(shape, candidate, rank)))
            wait.advance(1, len(ranks))
    return found


def _dry_run(shape: "ModelShape", candidate: "Candidate", rank: int) -> "tuple[DryRun, ModelShape, Candidate]":
    """Return the dry run of a rank, with the model and the candidate that it was made for.

    The engine builds Llama-style decoders only, so another model is replaced by the decoder of its sizes. DDP is
    replaced by `fully_shard` with replicas, as DDP's buckets need tensors with memory.
    """
    from atoll.parallel.planner.dry_run import apart
    from atoll.parallel.planner.shape import as_decoder

    decoder = as_decoder(shape)
    if decoder != shape:
        note("dry run: of the Llama-style decoder with these sizes, as the engine builds no other model")
    if candidate.plan.is_ddp:
        note("dry run: with fully_shard and replicas, as DDP's buckets do not run on meta tensors")
        candidate = dataclasses.replace(candidate, plan=dataclasses.replace(candidate.plan, zero=1))
    try:
        return apart(decoder, candidate, rank), decoder, candidate
    except ValueError as error:
        raise CommandError(*str(error).splitlines()) from error


def compared(run: "DryRun", shape: "ModelShape", candidate: "Candidate") -> list[dict[str, Any]]:
    """Return the measurements of a dry run beside the predictions: bytes of the state, and each kind of collective."""
    from atoll.parallel.planner.memory import memory
    from atoll.parallel.planner.traffic import totals

    expected = memory(shape, candidate, run.rank)
    rows: list[dict[str, Any]] = [
        {"what": name, "measured": getattr(run, name), "predicted": getattr(expected, name), "is_estimate": False}
        for name in ("parameters", "gradients", "optimizer")
    ]
    rows.append({"what": "peak", "measured": run.peak, "predicted": round(expected.total), "is_estimate": True})
    measured, predicted = run.counted(), totals(shape, candidate, run.rank)
    for axis, kind in sorted(measured.keys() | predicted.keys()):
        calls, num_bytes = measured.get((axis, kind), (0, 0))
        expected_calls, expected_bytes = predicted.get((axis, kind), (0, 0))
        what = f"{axis} {kind}"
        rows.append({"what": f"{what}, calls", "measured": calls, "predicted": expected_calls, "is_estimate": False})
        rows.append({"what": what, "measured": num_bytes, "predicted": expected_bytes, "is_estimate": False})
    return rows


def say_dry_run(rank: int, run: "DryRun", shape: "ModelShape", candidate: "Candidate") -> None:
    """Print a dry run beside its prediction."""
    say(f"\nDry run of rank {rank}: one step of the engine")
    table(
        ["", "measured", "predicted", ""],
        [
            (
                row["what"],
                *(
                    value if row["what"].endswith("calls") else printable_size(value)
                    for value in (row["measured"], row["predicted"])
                ),
                _verdict(row),
            )
            for row in compared(run, shape, candidate)
        ],
        empty="",
    )
    say("\nComputation that can hide its collectives: neither waits for the other")
    rows = [(*key, calls, hidden, f"{share:.1%}") for key, (calls, hidden, share) in run.hidden().items()]
    table(["axis", "kind", "calls", "can be hidden", "of the step, each"], rows, empty="no collectives")


def _verdict(row: dict[str, Any]) -> str:
    if row["is_estimate"]:
        return f"estimate, {row['predicted'] / row['measured'] - 1:+.1%}"
    return "equal" if row["measured"] == row["predicted"] else "DIFFERENT"


def hidden(run: "DryRun") -> list[dict[str, Any]]:
    """Return the computation that can hide each kind of collective, for a script."""
    return [
        {"axis": axis, "kind": kind, "calls": calls, "can_be_hidden": hidden, "share_of_step": share}
        for (axis, kind), (calls, hidden, share) in run.hidden().items()
    ]
