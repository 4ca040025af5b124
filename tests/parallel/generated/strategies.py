"""The strategy of Hypothesis for a case: a model, its training and a plan. It draws what a plan can do, mostly."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hypothesis import strategies as st

from tests.parallel.generated.models import BLOCKS, HOOKS, MADE, Block, Description
from tests.parallel.generated.plain import Training

PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"accumulate": 2},
    {"recompute": "full"},
    {"recompute": "selective", "accumulate": 2},
    {"zero": 3},
    *({"dp_replicate": ranks} for ranks in (2, 3, 4)),
    {"dp_replicate": 2, "accumulate": 2},
    {"dp_replicate": 2, "recompute": "full"},
    *({"dp_shard": ranks, "zero": zero} for ranks in (2, 3, 4) for zero in (1, 2, 3)),
    {"dp_shard": 2, "zero": 3, "accumulate": 2},
    {"dp_shard": 2, "zero": 1, "accumulate": 3},
    {"dp_shard": 2, "zero": 3, "recompute": "full"},
    {"dp_shard": 2, "zero": 3, "offload": True},
    {"dp_replicate": 2, "dp_shard": 2},
    *({"tp": ranks, "sequence_parallel": False} for ranks in (2, 4)),
    {"tp": 2, "dp_shard": 2, "sequence_parallel": False},
    {"tp": 2, "dp_replicate": 2, "sequence_parallel": False},
    *({"pp": ranks, "schedule": schedule} for ranks in (2, 3) for schedule in ("1f1b", "gpipe")),
    *({"pp": 2, "schedule": schedule} for schedule in ("interleaved-1f1b", "zbv-zero-bubble")),
    {"pp": 2, "dp_replicate": 2},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "tp": 2, "sequence_parallel": False},
)
"""Plans on 1 to 4 ranks."""

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


BY_PASSES = ("batch norm", "counting", "drawing")
"""Blocks whose outputs follow the other rows of a pass, the number of passes, or random numbers."""


@dataclass(frozen=True)
class Case:
    """A model, its training and a plan."""

    model: Description
    training: Training
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The ranks of the mesh."""
        found = 1
        for axis in AXES:
            found *= self.plan.get(axis, 1)
        return found

    @property
    def dp(self) -> int:
        """The ranks with different data."""
        found: int = self.plan.get("dp_replicate", 1) * self.plan.get("dp_shard", 1)
        return found

    @property
    def depends_on_passes(self) -> bool:
        """Whether a pass depends on the rows in it, or draws random numbers."""
        model = self.model
        norms = any(block.kind in BY_PASSES for block in model.blocks)
        return norms or model.dropout > 0 or "average" in model.buffers

    def __str__(self) -> str:
        """Return what differs from a plain model."""
        said = [f"{self.plan}"]
        for part in (self.model, self.training):
            said += [f"{each.name}={getattr(part, each.name)}" for each in fields(part)]
        return " ".join(said)


@st.composite
def cases(draw: st.DrawFn, plans: Sequence[dict[str, Any]] = PLANS) -> Case:
    """Draw a case, with one of the plans."""
    plan = draw(st.sampled_from(plans))
    has_pp, has_tp = "pp" in plan, "tp" in plan
    shapes = ["declared"] if has_tp else ["declared", "sequential"] if has_pp else ["own", "sequential", "declared"]
    kinds = [kind for kind in BLOCKS if kind not in BY_PASSES or not (has_pp or has_tp)]
    if has_tp:  # one of each kind that torch cannot replicate, and the plan refuses
        kinds = [kind for kind in kinds if kind not in ("encoder", "encoders", "lstm")]
    dtype = draw(st.sampled_from(["float64", "float64", "float64", "float32"]))
    entry = draw(st.sampled_from(["features", "features", "words", "sparse"]))
    optimizers = ["sgd", "momentum"] if dtype == "float32" else ["sgd", "momentum", "adam", "adamw"]
    if entry == "sparse":
        optimizers = ["sgd"]
    least = (
        2 if plan.get("schedule") in ("interleaved-1f1b", "zbv-zero-bubble") else 1
    )  # four pieces for the stages of two ranks
    blocks = draw(
        st.lists(
            st.sampled_from([Block(kind, made) for kind in kinds for made in _made(kind)]), min_size=least, max_size=4
        )
    )
    if has_tp:
        blocks[0] = Block("residual", draw(st.sampled_from([*MADE])))
    sharing = ["none", "none", "weights", "module"] + ["head"] * (entry != "features")
    model = Description(
        seed=draw(st.integers(0, 9)),
        shape=draw(st.sampled_from(shapes)),
        entry=entry,
        blocks=tuple(blocks),
        sharing=draw(st.sampled_from(sharing)),
        hooks=tuple(draw(st.lists(st.sampled_from([*HOOKS]), max_size=2, unique=True))),
        buffers=tuple(draw(st.lists(st.sampled_from(_buffers(plan)), max_size=2, unique=True))),
        frozen=draw(st.sampled_from(["none", "none", "entry"] + ["reference"] * (blocks[0].kind != "tagged"))),
        dtype=dtype,
        dropout=0.0 if has_pp or has_tp else draw(st.sampled_from([0.0, 0.0, 0.3])),
    )
    if Case(model, Training(), plan).depends_on_passes:  # a hook on a parameter is called once a step, not in each pass
        model = replace(model, hooks=tuple(hook for hook in model.hooks if hook != "after"))
    has_batch_norm = any(block.kind == "batch norm" for block in model.blocks)
    training = Training(
        optimizer=draw(st.sampled_from(optimizers)),
        decays_vectors=draw(st.booleans()),
        clip=draw(st.sampled_from([None, None, 0.1])),
        travels="all" if model.frozen == "none" else draw(st.sampled_from(["all", "trained"])),
        loss=draw(st.sampled_from(["mean", "ignored"])),
        rows=16 if has_batch_norm else draw(st.sampled_from([16, 20, 22])),  # its last batch may not be too small
        stop=draw(st.sampled_from([*[None] * 9, 1])),  # it costs a second training
    )
    return Case(model, training, plan)


def _made(kind: str) -> list[str]:
    """Return the ways in which a block's tensors may come to be: one that it holds twice must stay the same, and torch
    copies no attributes of a parameter."""
    few = {"tagged": ["plain", "filled"], "held": ["plain", "deepcopy", "filled"]}
    return few.get(kind, [*MADE])


def _buffers(plan: dict[str, Any]) -> list[str]:
    return ["constant", "passing", "expanded"] + ["average"] * ("pp" not in plan and "tp" not in plan)
