"""The model of a training with its first values: whole in one process and under DDP, shares alone on a sharded mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from atoll.ground.faults import faults_in
from atoll.parallel.checkpoint.ranks import Ranks, patient_ranks
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blank import give_memory
from atoll.parallel.engine.ties import tied_names
from atoll.parallel.exchange.initial import Blank, NotRepeatable, blank_or_none, fill
from atoll.parallel.exchange.shares import shares_of
from atoll.parallel.exchange.start import start_shares
from atoll.parallel.trainer.job import Job, JobRefused, base_of
from atoll.parallel.world import World
from atoll.task.base import TRAINED
from atoll.training.base.base_files import BaseRefused
from atoll.training.base.digests import digest_of
from atoll.training.base.loading import Matched, load
from atoll.training.local.training import seed_everything
from atoll.training.model.compiled import in_place
from atoll.training.model.frozen import frozen_of, keep_frozen
from atoll.training.model.parameters import forms_of, value_fault, value_faults
from atoll.training.worker.warm_start import Aliases, Start, StartRefused, start_model


@dataclass(slots=True)
class Built:
    """A model before the engine takes it over."""

    model: nn.Module
    tied: list[list[str]]
    """The names of the model's tied parameters (`engine.ties.tied_names`)."""
    note: str = ""
    """The sentence about tensors that have not started from the given file."""
    blank: Blank | None = None
    """The blank model, whose values come once it is sharded; None: they are there."""
    aliases: Aliases = field(default_factory=dict)
    start: Start | None = None
    """The file from which a blank model starts."""
    forms: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """Shape and dtype of each tensor of a blank model that is exchanged."""
    base: Matched | None = None
    """The files of the values of frozen tensors; None: the model has no base."""

    @property
    def from_base(self) -> frozenset[str]:
        """The names of the frozen tensors that the files of the base have."""
        return frozenset() if self.base is None else frozen_of(self.model) & self.base.sources.keys()


def build(job: Job, start: Start | None) -> Built:
    """Build a job's model: blank where the plan divides it and it is large, else with its values on each rank.

    Raises:
        JobRefused: values are not finite, or the file of the start does not fit.
    """
    if job.plan.is_divided:
        blank = blank_or_none(seeded(job))
        if blank is not None:
            model, tied = blank.model, tied_names(blank.model)
            aliases = {names[0]: names for names in tied}
            base = base_of(job, model)
            return Built(model, tied, blank=blank, aliases=aliases, start=start, forms=forms_of(model), base=base)
    model = seeded(job)()
    if faults := value_faults(model):
        raise JobRefused(*faults)
    try:
        if (base := base_of(job, model)) is not None:
            load(model, base)
        note = "" if start is None else start_model(model, start)
    except BaseRefused as error:
        raise JobRefused(*faults_in(error)) from error
    except (StartRefused, OSError) as error:
        raise JobRefused("; ".join(_of_start(error))) from error
    return Built(model, tied_names(model), note, base=base)


def _of_start(error: StartRefused | OSError) -> list[str]:
    """Return the faults of the file that a training starts from, each with the name of its setting."""
    return [f"train.start: {fault}" for fault in (error.faults if isinstance(error, StartRefused) else (str(error),))]


def give_values(built: Built, job: Job, parts: Sequence[nn.Module], axes: Axes | None, device: torch.device) -> None:
    """Allocate the parts of a blank model and fill them with their first values; every rank must call it.

    Raises:
        JobRefused: a rank cannot: values are not finite, the file does not fit, or the model is built in another way
            each time; on every rank.
    """
    if built.blank is None:
        return
    give_memory(parts, "cpu" if job.plan.offload else device)
    ranks, faults = Ranks(), list[str]()
    try:
        shares = shares_of(parts, axes, built.tied)
        fill(shares, parts, built.blank, seeded(job))
        if built.base is not None:
            faults += [fault for s in shares for fault in built.base.read(s.name, s.slices, s.local)]
        faults += [
            fault
            for share in shares
            if share.name in built.forms and (fault := value_fault(share.name, share.local)) is not None
        ]
        if built.start is not None:
            built.note, of_start = start_shares(shares, built.forms, built.aliases, built.start)
            faults += [f"train.start: {fault}" for fault in of_start]
    except (StartRefused, OSError) as error:
        faults += _of_start(error)
    except NotRepeatable as error:
        faults.append(
            f"the model cannot be built in shards: {error}; initialize its parameters in the same way each time"
        )
    try:
        ranks.raise_if_any(faults, JobRefused)
    finally:
        ranks.close()


def agreed_base(built: Built, world: World, kept: Path) -> dict[str, str]:
    """Return the digest of the frozen tensors in the base's files, a setting of the training; every rank must call it.

    The first rank of each machine reads its files, which may be a copy.

    Raises:
        JobRefused: machines have different files; on every rank.
    """
    if built.base is None:
        return {}
    with patient_ranks() as ranks:
        digest = digest_of(built.base.lines(built.from_base, kept)) if world.local_rank == 0 else ""
        digests = {found: rank for rank, found in reversed([*enumerate(ranks.gather(digest))]) if found}
    if len(digests) > 1:
        found = ", ".join(f"{each} at rank {rank}" for each, rank in digests.items())
        raise JobRefused(f"base: the machines have different files: their digests are {found}; give all the same ones")
    return {"base": next(iter(digests))}


def seeded(job: Job) -> Callable[[], nn.Module]:
    """Return the function that builds a job's model with its first values, the same each time."""

    def make() -> nn.Module:
        seed_everything(job.config.seed)
        model = in_place(job.task.model())
        if not isinstance(model, nn.Module):
            raise TypeError(f"task.model() must return a torch.nn.Module, got {type(model).__name__}")
        if job.task.travels == TRAINED:
            keep_frozen(model)
        return model

    return make
