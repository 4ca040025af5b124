"""The model of a client on a mesh: built by shares, warm from one request to the next."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.checkpoint.state import first_names, local_state
from atoll.parallel.crew.faults import is_divided
from atoll.parallel.crew.tally import Tally
from atoll.parallel.crew.together import together
from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blank import give_memory
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.step import Engine
from atoll.parallel.engine.ties import tied_names
from atoll.parallel.exchange.initial import Blank, blank_of, fill
from atoll.parallel.exchange.load import load_shares
from atoll.parallel.exchange.shares import Share, owned, shares_of
from atoll.parallel.local_training.parameters import build_model, forms_of
from atoll.parallel.local_training.passing_state import PassingState
from atoll.parallel.optimizers.norms import local
from atoll.parallel.task.task import Task


@dataclass(frozen=True, slots=True)
class Shard:
    """The box of a trained parameter that this rank holds."""

    share: Share
    parameter: nn.Parameter


class MeshModel:
    """A model on its mesh, with what it takes to fill and to read it.

    Args:
        engine: of the model.
        tied: the names of its tied weights.
        names: of all tensors of the whole model that travel.
        buffers: those of the float tensors among them that are not trained.
        tally: the loss of the engine.
    """

    def __init__(
        self, engine: Engine, tied: list[list[str]], names: Sequence[str], buffers: Collection[str], tally: Tally
    ) -> None:
        self.engine, self.tied, self.names, self.buffers, self.tally = engine, tied, names, buffers, tally
        self._passing = [PassingState(part) for part in engine.parts]

    def shares(self) -> list[Share]:
        """Return the boxes that this rank holds now; a model's code may replace a buffer."""
        return shares_of(self.engine.parts, self.engine.axes, self.tied)

    def owned(self) -> list[Share]:
        """Return the boxes that this rank sends."""
        return owned(self.shares(), self.names)

    def load(self, version: Path) -> None:
        """Give the model the values of a version, and its state that does not travel that of its construction.

        Raises:
            TaskMismatch: the version is of another model.
            OSError: it cannot be read.
        """
        for passing in self._passing:
            passing.restore()
        load_shares(self.shares(), version)

    def shards(self) -> list[Shard]:
        """Return the boxes of the trained parameters; of a tied weight on two stages each copy."""
        engine = self.engine
        held = local_state(engine.parts, engine.optimizers, first_names(self.tied)).trained
        by_place = {(trained.name, local(trained.parameter).data_ptr()): trained.parameter for trained in held}
        places = [(share, by_place.get((share.name, share.local.data_ptr()))) for share in self.shares()]
        return [Shard(share, parameter) for share, parameter in places if isinstance(parameter, nn.Parameter)]


def build(
    task: Task, plan: Plan, axes: Axes | None, device: torch.device, ranks: Ranks, *, seed: int, rows: int | None = None
) -> MeshModel:
    """Build the model of a task; every rank calls it.

    Where the mesh divides the model, no rank ever holds more than its shares and one parameter, unless the model's own
    code needs the values of its parameters. The values are undefined until `MeshModel.load`.

    Args:
        task: of the model.
        plan: of the mesh.
        axes: of the mesh; None: this rank is alone.
        device: of this rank.
        ranks: of the mesh.
        seed: of the run's model.
        rows: examples of this rank's largest batch, for a pipeline.

    Raises:
        Exception: the model cannot be built; on all ranks.
    """
    make = partial(build_model, task, seed)
    blank = together(ranks, lambda: _blank(make)) if is_divided(plan) else None
    model = together(ranks, make) if blank is None else blank.model
    names, buffers, tied = sorted(forms_of(model)), untrained(model), tied_names(model)
    tally = Tally(task, plan, axes, ranks)
    engine = assemble(model, plan, Optimization(loss=tally, make_optimizer=_none), axes=axes, device=device, rows=rows)
    if blank is not None:
        give_memory(engine.parts, "cpu" if plan.offload else device)
        if _draws_tables(blank.model, partial(build_model, task, seed + 1)):
            shares = shares_of(engine.parts, axes, tied)
            together(ranks, lambda: fill(shares, engine.parts, blank, make))
    return MeshModel(engine, tied, names, buffers, tally)


def untrained(model: nn.Module) -> list[str]:
    """Return the names of the travelling float tensors that are no parameters, as `parameters.buffers_of`."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    return [name for name in forms_of(model) if state[name].is_floating_point() and name not in parameters]


def _blank(make: Callable[[], nn.Module]) -> Blank | None:
    """Return the model without memory for its parameters; None if its code needs their values."""
    try:
        return blank_of(make)
    except (RuntimeError, NotImplementedError):
        return None


def _draws_tables(model: nn.Module, make_other: Callable[[], nn.Module]) -> bool:
    """Return whether buffers that do not travel depend on the seed: then they need the draws of a real construction."""
    tables = _tables(model)
    if not tables:
        return False
    other = blank_of(make_other).model
    return any(not torch.equal(one, two) for one, two in zip(tables, _tables(other), strict=True))


def _tables(model: nn.Module) -> list[torch.Tensor]:
    return [
        buffer.cpu()
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    ]


def _none(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return an optimizer that no step uses: each round has its own (`assemble.begin_again`)."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)
