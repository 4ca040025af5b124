"""The model of a client on a mesh: each rank builds its shards, which stay loaded between requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.checkpoint.state import first_names, local_state
from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blank import give_memory
from atoll.parallel.engine.buffers import differing_buffers
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.step import Engine
from atoll.parallel.engine.ties import tied_names
from atoll.parallel.exchange.initial import NotBlank, attributes_of, blank_of, blank_or_none, differing_attributes, fill
from atoll.parallel.exchange.load import load_shares
from atoll.parallel.exchange.shares import Share, owned, shares_of
from atoll.parallel.mesh_client.frozen import FrozenTensors, base_of, drawn_of, read_base
from atoll.parallel.mesh_client.tally import Tally
from atoll.parallel.mesh_client.together import together
from atoll.parallel.trials.between_passes import OWN_EXAMPLES
from atoll.task.task import Task
from atoll.training.base.loading import Matched
from atoll.training.model.as_built import AsBuilt
from atoll.training.model.frozen import Unchanged, frozen_of
from atoll.training.model.parameters import bare_model, build_model, forms_of
from atoll.training.model.passing_state import PassingState
from atoll.training.optimizers.norms import local
from atoll.training.trials.same_form import SameForm
from atoll.training.worker.left_behind import restored


@dataclass(frozen=True, slots=True)
class Shard:
    """The box of a trained parameter that this rank holds."""

    share: Share
    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    """The optimizer's group, with its settings."""

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's state for the parameter."""
        state: dict[str, torch.Tensor] = self.optimizer.state[self.parameter]
        return state


@dataclass(frozen=True, slots=True)
class Outline:
    """The names of a whole model's tensors."""

    forms: dict[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of all tensors that are exchanged or stay at the site."""
    trained: list[tuple[str, tuple[int, ...]]]
    """The parameters that an optimizer moves, with their shapes."""
    buffers: list[str]
    """The float tensors that are no parameters, as `parameters.buffers_of`."""
    tied: list[list[str]]
    """The names of each tied weight."""
    frozen: frozenset[str]
    """All names of the tensors that training does not change (`training.model.frozen`)."""

    @classmethod
    def of(cls, model: nn.Module) -> "Outline":
        """Return the outline of a model, with memory or without."""
        parameters, state, forms = dict(model.named_parameters()), model.state_dict(), forms_of(model)
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        return cls(
            forms=forms,
            trained=[(name, tuple(p.shape)) for name, p in parameters.items() if p.requires_grad and name in forms],
            buffers=[name for name in forms if state[name].is_floating_point() and name not in every],
            tied=tied_names(model),
            frozen=frozen_of(model),
        )

    @property
    def names(self) -> list[str]:
        """The names of all tensors that are not frozen, in order."""
        return sorted(self.forms)


class MeshModel:
    """A client's model on its mesh: the engine, and the names and boxes by which it is loaded and sent.

    Args:
        engine: the engine of the model.
        outline: the outline of the whole model.
        tally: the loss of the engine.
        base: the files of its frozen tensors; None: it has no base.
    """

    def __init__(self, engine: Engine, outline: "Outline", tally: Tally, base: Matched | None) -> None:
        self.engine, self.outline, self.tally = engine, outline, tally
        self.frozen = FrozenTensors(engine, outline.frozen, outline.tied, base)
        self.unchanged = Unchanged(self.frozen.here)
        """The check that the frozen tensors are unchanged since they were built."""
        self.stays: frozenset[str] = frozenset()
        """The names of the tensors that stay at the site (`Local.keep`)."""
        self.is_new = True
        """Whether the frozen tensors have the values with which the model was built."""
        self._passing = [PassingState(part) for part in engine.parts]
        self._as_built = AsBuilt.of_parts(engine.parts)
        self._flags = [(each, each.requires_grad) for part in engine.parts for each in part.parameters()]
        self.form = tally.form = SameForm(*engine.parts)
        """The form of the parts here, which no forward pass may change."""

    def shares(self) -> list[Share]:
        """Return the boxes that this rank holds now, without frozen ones; a model's code may replace a buffer."""
        every = shares_of(self.engine.parts, self.engine.axes, self.outline.tied)
        return [share for share in every if share.name in self.outline.forms]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of each tensor that is not frozen; for a trained tensor the optimizer's parameter."""
        held = local_state(self.engine.parts, self.engine.optimizers, first_names(self.outline.tied))
        found = dict(held.tensors) | {trained.name: trained.parameter for trained in held.trained}
        return {name: found[name] for name in self.outline.forms}

    def owned(self) -> list[Share]:
        """Return the boxes of the model that this rank sends in an update."""
        return [share for share in self._owned() if share.name not in self.stays]

    def owned_here(self) -> list[Share]:
        """Return the boxes of layers that stay at the site which this rank stores."""
        return [share for share in self._owned() if share.name in self.stays]

    def _owned(self) -> list[Share]:
        return owned(self.shares(), self.outline.names)

    def load(self, version: Path, stays: frozenset[str] = frozenset(), own: Path | None = None) -> None:
        """Load the values of a version into the model, and restore its state that is not exchanged.

        Args:
            version: file of the tensors that are exchanged.
            stays: the names of those that stay at the site.
            own: file of these; None: they stay unchanged.

        Raises:
            TaskMismatch: a file is of another model.
            OSError: a file cannot be read.
        """
        restored(self._as_built)
        for parameter, is_trained in self._flags:
            parameter.requires_grad_(is_trained)
        for passing in self._passing:
            passing.restore()
        self.stays, shares = stays, self.shares()
        load_shares([share for share in shares if share.name not in stays], version)
        if own is not None:
            self.is_new = False
            load_shares([share for share in shares if share.name in stays], own)

    def faults_of_buffers(self) -> list[str]:
        """Return the fault of buffers that follow the examples of each rank; every rank must call it."""
        names = differing_buffers(self.engine.parts, self.engine.axes)
        return [f"{', '.join(names)}: {OWN_EXAMPLES.format(mesh=self.engine.plan.mesh)}"] if names else []

    def shards(self) -> list[Shard]:
        """Return the boxes of the trained parameters; of a tied weight on two stages each copy."""
        engine = self.engine
        held = local_state(engine.parts, engine.optimizers, first_names(self.outline.tied)).trained
        by_place = {(trained.name, local(trained.parameter).data_ptr()): trained for trained in held}
        found = []
        for share in self.shares():
            trained = by_place.get((share.name, share.local.data_ptr()))
            if trained is not None and isinstance(trained.parameter, nn.Parameter):
                found.append(Shard(share, trained.parameter, trained.optimizer, trained.group))
        return found


@dataclass(frozen=True, slots=True)
class Here:
    """This rank's place in the mesh of a client: axes, device, plan."""

    plan: Plan
    axes: Axes | None
    """The axes of the mesh; None: this rank is alone."""
    device: torch.device
    """The device of this rank."""
    ranks: Ranks


def build(
    task: Task,
    here: Here,
    *,
    seed: int,
    rows: int | None = None,
    is_filled: bool = False,
    borrowed: Sequence[str] = (),
) -> MeshModel:
    """Build the model of a task; every rank calls it.

    Where the mesh divides the model, no rank ever holds more than its shares and one parameter, unless the model's
    code needs the values of its parameters. The values of exchanged tensors are undefined until `MeshModel.load`.

    Args:
        task: the task of the model.
        here: the mesh.
        seed: the seed of the run's model.
        rows: examples of this rank's largest batch, for a pipeline.
        is_filled: all tensors have the values with which the model is built.
        borrowed: the blocks whose parameters are used outside of their calls.

    Raises:
        BaseRefused: the files of the base do not fit; on all ranks.
        Exception: the model cannot be built; on all ranks.
    """
    plan, axes, device, ranks = here.plan, here.axes, here.device, here.ranks
    make = partial(bare_model, task, seed)
    blank = together(ranks, lambda: blank_or_none(make)) if plan.is_divided else None
    model = together(ranks, partial(build_model, task, seed)) if blank is None else blank.model
    base = together(ranks, lambda: base_of(task, model, seed))
    outline, tally = Outline.of(model), Tally(task, plan, axes, ranks)
    engine = assemble(
        model,
        plan,
        Optimization(loss=tally, make_optimizer=no_optimizer),
        axes=axes,
        device=device,
        rows=rows,
        borrowed=borrowed,
    )
    if blank is not None:
        give_memory(engine.parts, "cpu" if plan.offload else device)
        shares = shares_of(engine.parts, axes, outline.tied)
        if is_filled or _is_drawn(blank.model, outline, base, partial(bare_model, task, seed + 1)):
            together(ranks, lambda: fill(shares, engine.parts, blank, make))
        of_base = frozenset(share.name for share in shares) if is_filled else outline.frozen
        together(ranks, lambda: read_base(base, shares, of_base))
    return MeshModel(engine, outline, tally, base)


def _is_drawn(model: nn.Module, outline: Outline, base: Matched | None, make_other: Callable[[], nn.Module]) -> bool:
    """Return whether tensors that are not exchanged need the draws of a real construction.

    Such are frozen tensors that are in no file, and buffers and attributes that depend on the seed or on the values of
    parameters.
    """
    if drawn_of(outline.frozen, outline.tied, base):
        return True
    tables, attributes = _tables(model), attributes_of(model)
    if any(table.is_meta for table in tables):
        return True
    if not tables and not any(
        isinstance(leaf, float | torch.Tensor) for found in attributes.values() for leaf in found
    ):
        return False
    try:
        other = blank_of(make_other).model
    except NotBlank:
        return True
    same = zip(tables, _tables(other), strict=True)
    return any(not torch.equal(one, two) for one, two in same) or bool(
        differing_attributes(attributes, attributes_of(other))
    )


def _tables(model: nn.Module) -> list[torch.Tensor]:
    return [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    ]


def no_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return an optimizer that no step uses: each round has its own (`assemble.begin_again`)."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)
