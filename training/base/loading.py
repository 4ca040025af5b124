"""The values of a model from its base: the match of the files' tensors with the model's, and their digest.

files of the base --names, shapes--> Matched --boxes--> the model, whole or a rank's shares
"""

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from atoll.ground.printable import some_of
from atoll.task.base import Base, place_of
from atoll.task.context import Context
from atoll.training.base.base_files import BaseRefused, Stored, stored_in
from atoll.training.base.kept_lines import kept_lines

THREADS_MAX = 8
"""Number of threads that hash tensors; hashing releases the GIL."""

NAMES_MAX = 20
"""Largest number of tensors that a fault lists."""


@dataclass(frozen=True, slots=True)
class Matched:
    """The tensors of a base's files, matched with a model's."""

    place: Path
    """The folder or file."""
    sources: Mapping[str, Sequence[Stored]]
    """The tensors of the files, by the first name of the model's tensor; a tied tensor may have several."""

    def read(self, name: str, box: Sequence[slice], into: torch.Tensor) -> list[str]:
        """Copy a box (a slice of each axis) of a tensor, if the files have it, and return the faults of its values."""
        found = self.sources.get(name, ())
        if not found:
            return []
        found[0].read(box, into)
        others = [other for other in found[1:] if not found[0].equals(other, box)]
        names = " and ".join(stored.name for stored in (found[0], *others))
        return [f"{names} are one tensor of the model, and differ in {self.place}"] if others else []

    def lines(self, names: Collection[str], cache: Path | None = None) -> dict[str, str]:
        """Return the lines of the digest (`digests`) of the given tensors that the files have.

        Args:
            names: the names of the model's tensors.
            cache: the file with the lines of unchanged files, to which new lines are added.
        """
        wanted = {name: self.sources[name][0] for name in names if name in self.sources}
        with kept_lines(cache, {stored.file for stored in wanted.values()}) as known:
            missing = [stored for stored in wanted.values() if stored.name not in known[stored.file]]
            with ThreadPoolExecutor(min(THREADS_MAX, os.cpu_count() or 1)) as threads:
                for stored, line in zip(missing, threads.map(Stored.line, missing), strict=True):
                    known[stored.file][stored.name] = line
        return {name: known[stored.file][stored.name] for name, stored in wanted.items()}


def match(
    base: Base,
    context: Context,
    forms: Mapping[str, torch.Tensor],
    aliases: Mapping[str, Sequence[str]],
    frozen: Collection[str],
) -> Matched:
    """Match the tensors of a model with its base's files, by names, shapes and dtypes; no value is read.

    Args:
        base: the place of the files, and the names in them.
        context: the argument of a `Base.folder` that is a function.
        forms: the model's tensors by their first names, which may be on the meta device.
        aliases: all names of each tied tensor, by the first.
        frozen: the names of the tensors that are not exchanged, which the files must have.

    Raises:
        BaseRefused: frozen tensors are missing, shapes or kinds differ, or some are left over; the message lists all.
    """
    place = place_of(base, context)
    stored = stored_in(place)
    sources: dict[str, list[Stored]] = {}
    missing, misfits = list[str](), list[str]()
    for name, tensor in forms.items():
        names = [base.names(alias) for alias in (name, *aliases.get(name, ()))]
        given = dict.fromkeys(each for each in names if each is not None)
        sources[name] = [stored[each] for each in given if each in stored]
        if given and not sources[name] and name in frozen:
            missing.append(f"{name} (as {', '.join(given)})" if [*given] != [name] else name)
        misfits += [fault for one in sources[name] if (fault := _misfit(name, tensor, one))]
    used = {one.name for found in sources.values() for one in found}
    left = [n for n in stored if n not in used and not any(fnmatchcase(n, pattern) for pattern in base.unused)]
    faults = [
        *([f"it lacks {some_of(missing)}"] if missing else []),
        *misfits[:NAMES_MAX],
        *([f"it has, and the model lacks, {some_of(left)} (name them in Base(unused=...))"] if left else []),
    ]
    if faults:
        raise BaseRefused(f"base {place}: {'; '.join(faults)}")
    return Matched(place, {name: found for name, found in sources.items() if found})


def _misfit(name: str, tensor: torch.Tensor, stored: Stored) -> str:
    """Return the difference of a stored tensor from the model's; empty: it fits."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    is_kind = stored.dtype.is_floating_point == dtype.is_floating_point and (
        dtype.is_floating_point or torch.promote_types(stored.dtype, dtype) == dtype
    )
    if stored.shape == shape and is_kind:
        return ""
    return f"{stored.name} is {_dtype(stored.dtype)} {stored.shape}, and {name} of the model is {_dtype(dtype)} {shape}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensors_of(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """Return a model's tensors by first name, and all names of each tied tensor by the first; also on meta."""
    names: dict[int, list[str]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            tensors.setdefault(names.setdefault(id(tensor), [name])[0], tensor)
            names[id(tensor)] += [name] * (names[id(tensor)][0] != name)
    return tensors, {of_one[0]: of_one for of_one in names.values() if len(of_one) > 1}


def load(model: torch.nn.Module, matched: Matched) -> None:
    """Load the values of a model's base (its files of pretrained tensors) into the model, block by block.

    Raises:
        BaseRefused: the files have two values of a tied tensor.
    """
    faults = []
    for name, tensor in tensors_of(model)[0].items():
        faults += matched.read(name, [slice(0, length) for length in tensor.shape], tensor)
    if faults:
        raise BaseRefused(*faults)
