"""The idle share of a pipeline: by formula, and by simulating a schedule's list of actions.

Legend: p ranks, m micro-batches, V stages on each rank, F, B the times of a stage's forward and whole backward pass of
one micro-batch; a zero-bubble schedule splits B = I + W into the gradients of the inputs and of the weights.

    GPipe, 1F1B            (p - 1) / (m + p - 1)
    interleaved 1F1B       (p - 1) / (V m + p - 1)
    zero-bubble (ZB-H1)    (p - 1)(F + I - W) / (V m (F + B) + (p - 1)(F + I - W))

Sources: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", SC 2021, section 2.2; Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, table 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from atoll.parallel.engine.plan import SCHEDULES

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"


class Action(NamedTuple):
    """One pass of a rank for one micro-batch."""

    stage: int
    kind: str
    """The kind of the pass. F: forward; B: backward; I and W: its two halves, for the inputs and for the weights."""
    microbatch: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, or any other unit, of one stage and micro-batch."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def of(self, kind: str) -> float:
        """Return the time of an action of this kind."""
        times = {FORWARD: self.forward, BACKWARD_INPUT: self.backward_input, BACKWARD_WEIGHT: self.backward_weight}
        return times.get(kind, self.backward_input + self.backward_weight)


EQUAL = Times()
"""The times F = I = W: a backward pass has twice the operations of a forward pass."""


def bubble(schedule: str, p: int, m: int, stages_per_rank: int = 1, times: Times = EQUAL) -> float:
    """Return the idle share of a step in [0, 1), by formula.

    It holds for m >= p, and for interleaved schedules in whole rounds of p.

    Args:
        schedule: one of the engine's.
        p: ranks of the pipeline.
        m: micro-batches.
        stages_per_rank: V.
        times: the times of one stage; they matter to zero-bubble schedules only.
    """
    if schedule in ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"):
        return (p - 1) / (stages_per_rank * m + p - 1)
    idle = (p - 1) * max(0.0, times.forward + times.backward_input - times.backward_weight)
    busy = stages_per_rank * m * (times.forward + times.backward_input + times.backward_weight)
    return idle / (busy + idle)


def simulate(orders: Sequence[Sequence[Action]], num_stages: int, times: Times = EQUAL) -> float:
    """Return the idle share of a schedule if every rank runs its actions in order, each as soon as it has its inputs.

    A forward needs the forward of the stage before; a backward (of inputs) that of the next stage, or, on the last
    stage, its forward. Sending costs nothing.

    Args:
        orders: each rank's actions, in order.
        num_stages: the number of stages of the whole pipeline.
        times: the times of every stage alike.

    Returns:
        1 - busy time / (ranks x time until the last one has ended).

    Raises:
        ValueError: the ranks wait for each other forever.
    """
    done: dict[tuple[int, str, int], float] = {}
    clocks, positions = [0.0] * len(orders), [0] * len(orders)
    busy = 0.0
    while any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        before = list(positions)
        for rank, order in enumerate(orders):
            while positions[rank] < len(order) and (ready := _ready(order[positions[rank]], done, num_stages)) >= 0:
                action = order[positions[rank]]
                duration = times.of(action.kind)
                clocks[rank] = max(clocks[rank], ready) + duration
                busy += duration
                done[action.stage, _result(action.kind), action.microbatch] = clocks[rank]
                positions[rank] += 1
        if positions == before:
            stuck = [str(order[k]) for k, order in zip(positions, orders, strict=True) if k < len(order)]
            raise ValueError(f"the schedule never ends: {', '.join(stuck)} wait for each other")
    return 1 - busy / (len(orders) * max(clocks))


def _result(kind: str) -> str:
    return BACKWARD_INPUT if kind == BACKWARD else kind


def _ready(action: Action, done: Mapping[tuple[int, str, int], float], num_stages: int) -> float:
    """Return the time at which an action's inputs are ready; -1 while that is unknown."""
    stage, kind, microbatch = action
    if kind == FORWARD:
        return done.get((stage - 1, FORWARD, microbatch), -1.0) if stage else 0.0
    if kind == BACKWARD_WEIGHT:
        return done.get((stage, BACKWARD_INPUT, microbatch), -1.0)
    is_last = stage == num_stages - 1
    return done.get((stage, FORWARD, microbatch) if is_last else (stage + 1, BACKWARD_INPUT, microbatch), -1.0)


def actions(schedule: str, p: int, m: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """Return the actions of each rank, in order; PyTorch's lists for schedules with several stages on a rank.

    Raises:
        ValueError: the schedule does not support these numbers of stages or micro-batches.
    """
    if schedule in ("gpipe", "1f1b"):
        return [_single(schedule, rank, p, m) for rank in range(p)]
    return _torch_actions(schedule, p, m, stages_per_rank)


def _single(schedule: str, rank: int, p: int, m: int) -> list[Action]:
    """Return a rank's actions. GPipe: all forwards, all backwards. 1F1B: p - rank forwards, then both in turn."""
    ahead = m if schedule == "gpipe" else min(m, p - rank)
    order = [Action(rank, FORWARD, k) for k in range(ahead)]
    for k in range(m):
        order.append(Action(rank, BACKWARD, k))
        if ahead + k < m:
            order.append(Action(rank, FORWARD, ahead + k))
    return order


def _torch_actions(schedule: str, p: int, m: int, stages_per_rank: int) -> list[list[Action]]:
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages: list[Any] = [
        SimpleNamespace(
            num_stages=p * stages_per_rank,
            group_size=p,
            group_rank=0,
            stage_index=k * p,
            has_backward=False,
            stage_index_to_group_rank=None,
            submod=None,
            device="cpu",
            group=None,
        )
        for k in range(stages_per_rank)
    ]
    orders = get_schedule_class(SCHEDULES[schedule][0])(stages, n_microbatches=m).pipeline_order
    return [[found for action in orders[rank] if action is not None for found in _plain(action)] for rank in range(p)]


def _plain(action: Any) -> list[Action]:
    """Convert an action of torch's schedule: an overlap to its two parts, one that only moves tensors to none."""
    if action.sub_actions is not None:
        return [found for part in action.sub_actions for found in _plain(part)]
    kind = action.computation_type.value
    return [Action(action.stage_index, kind, action.microbatch_index)] if kind in (*"FBIW",) else []
