"""A model that starts from the tensors of a safetensors file, of Atoll or of another library.

A tensor of the model takes the values of the file's tensor of its name; a tied tensor takes the values of any of its
names. Floats are sent as float32, bool as uint8, as everywhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.ground.printable import some_of
from atoll.task.arrays import Arrays
from atoll.task.errors import TaskMismatch
from atoll.tensors.layout import BESIDE

NAMES_MAX = 8
"""Largest number of tensors that a fault lists."""

LENIENT = "strict = false keeps the initial values of tensors that do not fit"

Aliases = Mapping[str, Sequence[str]]
"""All names of a tied tensor, by the name under which it is exchanged; other tensors are missing."""


class StartRefused(TaskMismatch):
    """The file does not fit the model; the message lists every difference, each of them one of the faults."""


@dataclass(frozen=True, slots=True)
class Start:
    """A file from whose tensors a model starts."""

    path: Path
    is_strict: bool = True
    """Whether to refuse a file whose tensors differ from the model's."""


@dataclass(frozen=True, slots=True)
class Matched:
    """The tensors of a model that has started from a file."""

    arrays: Arrays
    own: tuple[str, ...] = ()
    """The tensors of the model that have kept their initial values; empty if strict."""
    unused: tuple[str, ...] = ()
    """The tensors of the file that the model lacks, or has with another shape; empty if strict."""

    @property
    def note(self) -> str:
        """The sentence about tensors that kept their initial values or were not used, or ""."""
        parts = (("the initial values stay in", self.own), ("not used:", self.unused))
        return "; ".join(f"{what} {listed(names)}" for what, names in parts if names)


def start_model(model: Any, start: Start) -> str:
    """Load the values of a file into a new torch model; return a note on the remaining tensors.

    Raises:
        StartRefused: the file does not fit, or is no safetensors file; the model is unchanged.
        OSError: its disk fails.
    """
    from atoll.training.model.parameters import aliases_of, load_parameters, parameters_of

    found = started(parameters_of(model), aliases_of(model), start)
    load_parameters(model, found.arrays)
    return found.note


def listed(names: Iterable[str]) -> str:
    """Join names for a message, the first few of many."""
    return some_of(names, NAMES_MAX)


def started(initial: Arrays, aliases: Aliases, start: Start, *, grows: bool = False) -> Matched:
    """Return a model's initial tensors, replaced by a file's tensors of the same names.

    Args:
        initial: the task's initial tensors, in their form on the wire; SCAFFOLD's control variates stay unchanged.
        aliases: the names of its tied tensors.
        start: the file.
        grows: the model grows by rows, so the file may have any number of them.

    Raises:
        StartRefused: the file does not fit, or is no safetensors file.
        OSError: its disk fails.
    """
    given = read(start.path)
    if grows:
        initial = {name: _with_rows_of(given.get(name), own) for name, own in initial.items()}
    return matched(initial, aliases, given, is_strict=start.is_strict, where=str(start.path))


def _with_rows_of(given: np.ndarray[Any, Any] | None, own: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a model's tensor, with as many rows as the file's if they differ in nothing else."""
    if given is None or given.ndim != own.ndim or given.shape[1:] != own.shape[1:]:
        return own
    resized = np.empty(given.shape, own.dtype)  # its values are the file's, or it is not used
    return own if _misfit(given, resized) else resized


def matched(initial: Arrays, aliases: Aliases, given: Arrays, *, is_strict: bool, where: str) -> Matched:
    """Return a model's tensors with the given values from `where`. Raises as `started`."""
    match = match_names(initial, aliases, given, is_strict=is_strict, where=where)
    arrays, faults = dict(initial), list[str]()
    for name, found in match.sources.items():
        if any(not np.array_equal(given[alias], given[found[0]], equal_nan=True) for alias in found[1:]):
            faults.append(differing(found, where))
        arrays[name] = given[found[0]].astype(initial[name].dtype)
        if not np.isfinite(arrays[name]).all():
            faults.append(not_finite(found[0], where))
    if faults or match.faults:
        raise StartRefused(*faults, *match.faults)
    return Matched(arrays, match.own, match.unused)


@dataclass(frozen=True, slots=True)
class Match:
    """The match of a file's tensors with a model's."""

    sources: Mapping[str, Sequence[str]]
    """The names in the file of each tensor of the model that starts from it, several for tied weights."""
    own: tuple[str, ...]
    """The tensors of the model that keep their initial values."""
    unused: tuple[str, ...]
    """The tensors of the file that the model lacks, or has with another shape."""
    faults: tuple[str, ...]
    """The reasons why the file does not fit, by names, shapes and dtypes."""


def match_names(
    initial: Mapping[str, Any], aliases: Aliases, given: Mapping[str, Any], *, is_strict: bool, where: str
) -> Match:
    """Match a model's tensors with a file's, by names, shapes and dtypes; no value is read.

    Args:
        initial: arrays, or objects with `shape` and `dtype`, in their form on the wire.
        aliases: the names of the model's tied tensors.
        given: the file's tensors.
        is_strict: refuse a file whose tensors differ from the model's.
        where: the file, for the messages.
    """
    sources: dict[str, list[str]] = {}
    own, used, misfits, faults = list[str](), set[str](), list[str](), list[str]()
    tensors = [name for name in initial if not name.startswith(BESIDE)]
    for name in tensors:
        found = [alias for alias in dict.fromkeys((name, *aliases.get(name, ()))) if alias in given]
        misfit = _misfit(given[found[0]], initial[name]) if found else ""
        if found and not misfit:
            sources[name] = found
            used.update(found)
            continue
        own.append(name)
        misfits += [f"{found[0]} is {misfit}"] if misfit else []
    unused = [name for name in given if name not in used]
    if len(own) == len(tensors):
        faults.append(
            f"no tensor of {where} is one of the model, which has {listed(own)}, and the file "
            f"{listed(given) or 'none'}: name another file, or give its tensors the names of the model's"
        )
    elif is_strict and (own or unused):
        faults += [*misfits, *_differences(own, unused, misfits, where)]
        faults[-1] += f" ({LENIENT})"
    return Match(sources, tuple(own), tuple(unused), tuple(faults))


def differing(found: Sequence[str], where: str) -> str:
    """Return the fault of a tied tensor whose names have different values."""
    return f"{' and '.join(found)} are one tensor of the model, and differ in {where}"


def not_finite(name: str, where: str) -> str:
    """Return the fault of a tensor with NaN or infinite values."""
    return f"{name} has NaN, infinite values or values beyond float32 in {where}"


def _differences(own: list[str], unused: list[str], misfits: list[str], where: str) -> list[str]:
    odd = {misfit.partition(" is ")[0] for misfit in misfits}
    parts = (("lacks", [name for name in own if name not in odd]), ("has, and the model lacks,", unused))
    shown = [(what, [name for name in names if name not in odd]) for what, names in parts]
    return [f"{where} {what} {listed(names)}" for what, names in shown if names]


def _misfit(given: np.ndarray[Any, Any], own: np.ndarray[Any, Any]) -> str:
    """Return the difference of a file's tensor from the model's; empty: it fits."""
    if given.shape != own.shape:
        return f"{given.dtype} {given.shape}, and the model has {own.dtype} {own.shape}"
    is_same_kind = (given.dtype.kind == "f") == (own.dtype.kind == "f")
    if not is_same_kind or (own.dtype.kind != "f" and not np.can_cast(given.dtype, own.dtype, "safe")):
        return f"{given.dtype}, and the model has {own.dtype}"
    return ""


def read(path: Path) -> Arrays:
    """Return the tensors of a safetensors file in their form on the wire, without SCAFFOLD's control variates.

    Raises:
        StartRefused: it is no safetensors file.
        OSError: its disk fails.
    """
    from safetensors import SafetensorError, safe_open

    check_readable(path)
    try:
        with safe_open(path, framework="np") as file:
            names = [name for name in file.keys() if not name.startswith(BESIDE)]  # noqa: SIM118 - no mapping
            dtypes = {name: file.get_slice(name).get_dtype() for name in names}
            arrays = {name: file.get_tensor(name) for name in names if dtypes[name] in _OF_NUMPY}
        if rest := [name for name in names if name not in arrays]:
            arrays |= _by_torch(path, rest)
    except SafetensorError as error:
        raise no_safetensors(path, error) from error
    return {name: _as_it_travels(arrays[name]) for name in names}


def check_readable(path: Path) -> None:
    """Check that a file can be opened: the library's reasons are less clear.

    Raises:
        StartRefused: it is a folder, missing or not readable by this user.
        OSError: its disk fails.
    """
    try:
        with path.open("rb"):
            pass
    except IsADirectoryError as error:
        raise StartRefused(f"{path} is a directory: name a file in it") from error
    except FileNotFoundError as error:
        raise StartRefused(f"there is no file {path}") from error
    except PermissionError as error:
        raise StartRefused(f"{path} cannot be read: permission denied") from error


def no_safetensors(path: Path, error: Exception) -> StartRefused:
    """Return the refusal of a file in another format, such as `torch.save`'s."""
    return StartRefused(
        f"{path} is not a safetensors file ({error}): save the model's state_dict with safetensors.torch.save_file"
    )


_OF_NUMPY = frozenset({"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64", "BOOL"})
"""The dtypes of a file that numpy supports."""


def _by_torch(path: Path, names: list[str]) -> Arrays:
    """Read the tensors of a file whose dtypes numpy lacks, such as bfloat16, as float32."""
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in names}
    if odd := [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.dtype.is_floating_point]:
        raise StartRefused(f"{path}: {listed(odd)}, and only floats, integers and bool can be exchanged")
    return {name: tensor.to(torch.float32).numpy() for name, tensor in tensors.items()}


def _as_it_travels(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # beyond float32: infinite, and refused by its name
            return array.astype(np.float32)
    return array.astype(np.uint8) if array.dtype == np.bool_ else array
