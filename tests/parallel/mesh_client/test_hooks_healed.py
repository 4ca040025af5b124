"""A round with hooks that hold values from step to step: a rank is killed, and the others go on at the checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from atoll.parallel.engine.forked import RankFailed
from atoll.tensors import safetensors_file
from tests.parallel.forked import run_ranks
from tests.parallel.mesh_client.clients import (
    Arrays,
    Json,
    counted_on_a_rank,
    distance,
    in_one_process,
    plan_of,
    rank_1_killed,
    request_of,
    update_in,
    write_version,
)
from tests.parallel.mesh_client.test_hooks import LAYOUTS, SHORT

pytestmark = pytest.mark.real

TIMEOUT_S = 560.0


def killed(folder: Path, name: str, options: Json, after: int, **fields: Any) -> Path:
    """Kill rank 1 of a training after some steps; return the folder of its checkpoints."""
    request = request_of(folder, "mesh", checkpoint=str(folder / "kept"), **fields)
    with pytest.raises(RankFailed, match="rank 1: died with exit code -9"):
        run_ranks(rank_1_killed, plan_of(options).mesh.size, name, options, request, after, timeout_s=TIMEOUT_S)
    (kept,) = (folder / "kept").iterdir()
    return kept


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[] if layout in SHORT else [pytest.mark.long]) for layout in LAYOUTS]
)
def test_a_healed_training_with_hooks_equals_an_undisturbed_one(layout: str, tmp_path: Path) -> None:
    """12 steps; the kill falls into step 8, after the checkpoint of step 6 has begun."""
    write_version(tmp_path, "holding")
    undisturbed, expected = in_one_process(tmp_path, name="holding")
    options = LAYOUTS[layout]
    kept = killed(tmp_path, "holding", options, 7, checkpoint_every=3)
    assert (kept / "latest").read_text() in {"step-00000003", "step-00000006"}
    answer, steps, update = healed(tmp_path, "holding", options, checkpoint_every=3)
    assert (answer["steps"], answer["num_examples"]) == (undisturbed["steps"], undisturbed["num_examples"])
    assert steps in (6, 9)
    assert distance(update, expected) < 1e-6
    states = [safetensors_file.read(tmp_path / f"{which}.own") for which in ("mesh", "one")]
    assert distance(*states) < 1e-6
    assert states[0]["state/steps"] == 12


def test_a_round_that_no_checkpoint_can_hold_goes_on_at_the_last_one(tmp_path: Path) -> None:
    """The hooks hold an optimizer of their own from step 5 on: the checkpoint of step 4 is the last one."""
    write_version(tmp_path, "opaque")
    _, expected = in_one_process(tmp_path, name="opaque")
    kept = killed(tmp_path, "opaque", {"dp_replicate": 2}, 11, checkpoint_every=4)
    assert (kept / "latest").read_text() == "step-00000004"
    answer, steps, update = healed(tmp_path, "opaque", {"dp_replicate": 2}, checkpoint_every=4)
    assert (answer["steps"], steps) == (12, 8)
    assert distance(update, expected) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [("fsdp x tp", "ddp"), ("ddp", "fsdp"), ("fsdp", "tp")])
def test_a_round_with_hooks_goes_on_on_another_mesh(before: str, after: str, tmp_path: Path) -> None:
    """From the checkpoint, unless hooks hold tensors that the other mesh cannot divide in the same way."""
    write_version(tmp_path, "holding")
    _, expected = in_one_process(tmp_path, name="holding")
    killed(tmp_path, "holding", LAYOUTS[before], 7, checkpoint_every=3)
    _, steps, update = healed(tmp_path, "holding", LAYOUTS[after], checkpoint_every=3)
    assert steps in ((6, 9) if before == "ddp" else (12,))
    assert distance(update, expected) < 1e-6


def healed(folder: Path, name: str, options: Json, **fields: Any) -> tuple[Json, int, Arrays]:
    """Train with the checkpoints that are there; return the answer, the steps that were made now, and the update."""
    request = request_of(folder, "mesh", checkpoint=str(folder / "kept"), **fields)
    found = run_ranks(counted_on_a_rank, plan_of(options).mesh.size, name, options, request, timeout_s=TIMEOUT_S)
    answer, steps = found[0]
    return answer, steps, update_in(folder / "mesh", answer["parts"])
