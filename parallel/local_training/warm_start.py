"""A model that starts from the tensors of a safetensors file, of Atoll or of another library, in place of its own.

A tensor of the model takes the values of the file's tensor of its name; one that the model holds under several names
(tied weights) takes those of any of them. Floats travel as float32, bool as uint8, as everywhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.aggregation.tensors.layout import BESIDE
from atoll.parallel.task.arrays import Arrays
from atoll.parallel.task.errors import TaskMismatch

NAMES_MAX = 8
"""The tensors that a fault lists."""

LENIENT = "strict = false keeps the task's own values of what does not fit"

Aliases = Mapping[str, Sequence[str]]
"""All names of a tensor, by the one under which it travels; a tensor that is missing here has one name."""


class StartRefused(TaskMismatch):
    """The file is no start of the model; the message lists every difference, each of them one of the faults."""

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Start:
    """A file whose tensors a model starts from."""

    path: Path
    is_strict: bool = True
    """Refuse a file that does not have all tensors of the model, and no others."""


@dataclass(frozen=True, slots=True)
class Matched:
    """The tensors of a model that has started from a file."""

    arrays: Arrays
    own: tuple[str, ...] = ()
    """The tensors of the model that have kept the task's own values; none if strict."""
    unused: tuple[str, ...] = ()
    """The tensors of the file that the model lacks, or has with another shape; none if strict."""

    @property
    def note(self) -> str:
        """The tensors that were left, in words; empty: none."""
        parts = (("the task's own values stay in", self.own), ("not used:", self.unused))
        return "; ".join(f"{what} {listed(names)}" for what, names in parts if names)


def start_model(model: Any, start: Start) -> str:
    """Give a newly built torch model the values of a file, in place; return a note on what was left.

    Raises:
        StartRefused: the file does not fit, or is no safetensors file; the model is unchanged.
        OSError: its disk fails.
    """
    from atoll.parallel.local_training.parameters import aliases_of, load_parameters, parameters_of

    found = started(parameters_of(model), aliases_of(model), start)
    load_parameters(model, found.arrays)
    return found.note


def listed(names: Iterable[str]) -> str:
    """Return names as a person reads them, the first few of many."""
    names = [*names]
    more = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def started(initial: Arrays, aliases: Aliases, start: Start, *, grows: bool = False) -> Matched:
    """Return a model's tensors with the values of a file.

    Args:
        initial: the task's own tensors, as they travel; SCAFFOLD's control variates stay as they are.
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
    """Return a model's own tensor, or one that has as many rows as the file's if it differs in nothing else."""
    if given is None or given.ndim != own.ndim or given.shape[1:] != own.shape[1:]:
        return own
    resized = np.empty(given.shape, own.dtype)  # its values are the file's, or it is not used
    return own if _misfit(given, resized) else resized


def matched(initial: Arrays, aliases: Aliases, given: Arrays, *, is_strict: bool, where: str) -> Matched:
    """Return a model's tensors with the values of the given ones; `where` they are from. Raises as `started`."""
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
    """The tensors of a file from which those of a model start."""

    sources: Mapping[str, Sequence[str]]
    """The names in the file of each tensor of the model that starts from it, which has all of them (tied weights)."""
    own: tuple[str, ...]
    """The tensors of the model that keep the task's own values."""
    unused: tuple[str, ...]
    """The tensors of the file that the model lacks, or has with another shape."""
    faults: tuple[str, ...]
    """The reasons that the file is no start, by names, shapes and dtypes."""


def match_names(
    initial: Mapping[str, Any], aliases: Aliases, given: Mapping[str, Any], *, is_strict: bool, where: str
) -> Match:
    """Match a model's tensors with those of a file. No value is looked at: only shapes and dtypes.

    Args:
        initial: arrays, or what has their `shape` and `dtype`, as they travel.
        aliases: the names of the model's tied tensors.
        given: those of the file.
        is_strict: refuse a file that has not all tensors of the model, and no others.
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
    """Return the fault of a tensor with values that cannot travel."""
    return f"{name} has NaN, infinite values or values beyond float32 in {where}"


def _differences(own: list[str], unused: list[str], misfits: list[str], where: str) -> list[str]:
    odd = {misfit.partition(" is ")[0] for misfit in misfits}
    parts = (("lacks", [name for name in own if name not in odd]), ("has, and the model lacks,", unused))
    shown = [(what, [name for name in names if name not in odd]) for what, names in parts]
    return [f"{where} {what} {listed(names)}" for what, names in shown if names]


def _misfit(given: np.ndarray[Any, Any], own: np.ndarray[Any, Any]) -> str:
    """Return how a tensor of the file differs from the model's; empty: it fits."""
    if given.shape != own.shape:
        return f"{given.dtype} {given.shape}, and the model has {own.dtype} {own.shape}"
    is_same_kind = (given.dtype.kind == "f") == (own.dtype.kind == "f")
    if not is_same_kind or (own.dtype.kind != "f" and not np.can_cast(given.dtype, own.dtype, "safe")):
        return f"{given.dtype}, and the model has {own.dtype}"
    return ""


def read(path: Path) -> Arrays:
    """Return the tensors of a safetensors file as they travel, without SCAFFOLD's control variates.

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
        StartRefused: it cannot, as it is a folder, missing or not for this user.
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
    """Return the refusal of a file in another format, such as that of `torch.save`."""
    return StartRefused(
        f"{path} is no safetensors file ({error}): save the model's state_dict with safetensors.torch.save_file"
    )


_OF_NUMPY = frozenset({"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64", "BOOL"})
"""The dtypes of a file that numpy has."""


def _by_torch(path: Path, names: list[str]) -> Arrays:
    """Return floats that numpy lacks, such as bfloat16, as float32."""
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in names}
    if odd := [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.dtype.is_floating_point]:
        raise StartRefused(f"{path}: {listed(odd)}, and only floats, integers and bool can travel")
    return {name: tensor.to(torch.float32).numpy() for name, tensor in tensors.items()}


def _as_it_travels(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # beyond float32: infinite, and refused by its name
            return array.astype(np.float32)
    return array.astype(np.uint8) if array.dtype == np.bool_ else array
