"""The state of a model and of a task's functions that is neither parameter nor buffer, as a part of each checkpoint.

Numbers, strings, tensors, arrays, random generators, and containers and objects of them: in the attributes of modules,
of a loss and of metrics, in what these enclose, and in the globals that a task's functions name. What has changed since
the model was built is saved; what has no such form is named. Torch loads it as weights alone: nothing is executed.
"""

import base64
import io
import logging
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset

from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.engine.repetition import DEEP, OF_TORCH, PLAIN, copied, is_holder, is_same
from atoll.task.context import Contextual
from atoll.task.metrics import Metric
from atoll.task.task import Task
from atoll.training.model.places import is_generator

logger = logging.getLogger(__name__)

BYTES_MAX = 64 << 20
"""Largest size of a rank's state [bytes]; values beyond it are named in the log, and not saved."""

DATA = (*PLAIN, torch.Tensor, np.ndarray, list, tuple, dict, set, deque)

Holder = MutableMapping[str, Any]


class NoForm(ValueError):
    """A value that a checkpoint cannot hold."""


class Outside:
    """The state of the parts of a model on this rank, and of functions of its task. Every rank calls the methods.

    Args:
        parts: the parts of the model, as they were built.
        functions: the task's loss and metrics, by name.
        ranks: the ranks of the training.
        data: the data set. A number that it changes is named: rows are read ahead, so that it fits to no step.
    """

    def __init__(
        self, parts: Sequence[nn.Module], functions: Mapping[str, Any], ranks: Ranks, data: Any = None
    ) -> None:
        self._parts, self._functions, self._ranks, self._data = parts, functions, ranks, data
        self._numbers = _numbers_of(data)
        self._named: set[str] = set()
        memo: dict[int, Any] = {}
        self._first = {name: copied(holder.get(key), memo, DEEP) for name, (holder, key) in self._places().items()}

    def state(self) -> dict[str, Any]:
        """Return the state that has changed since the model was built, of each rank; of one, if all have the same."""
        mine, left = dict[str, str](), BYTES_MAX
        for name, number in _numbers_of(self._data).items():
            if name in self._numbers and number != self._numbers[name]:
                self._name(name, "its rows are read ahead")
        for name, (holder, key) in self._places().items():
            value = holder.get(key)
            if name in self._first and is_same(self._first[name], value, DEEP):
                continue
            try:
                text = _encoded(_form(value, DEEP))
                if len(text) > left:
                    raise NoForm(f"of more than {BYTES_MAX:,} bytes")
            except NoForm as error:
                self._name(name, str(error))
                continue
            mine[name], left = text, left - len(text)
        of_ranks = self._ranks.gather(mine)
        return {"ranks": of_ranks[:1] if all(other == of_ranks[0] for other in of_ranks) else of_ranks}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the saved state. On another number of ranks, each gets a value from the first rank that had it."""
        of_ranks = state["ranks"]
        found: dict[str, str] = {}
        for of_rank in reversed(of_ranks):
            found |= of_rank
        if len(of_ranks) == self._ranks.size:
            found = of_ranks[self._ranks.rank]
        for name, (holder, key) in self._places().items():
            if name in found:
                holder[key] = _value(_decoded(found[name]), holder.get(key))
        for part in self._parts:  # attributes that a pass has made
            for prefix, module in _named_modules(part):
                for name, text in found.items():
                    owner, _, key = name.rpartition(".")
                    if owner == f"model.{prefix}".removesuffix(".") and key not in vars(module) | module._buffers:
                        vars(module)[key] = _value(_decoded(text), None)

    def _name(self, name: str, why: str) -> None:
        if name not in self._named:
            self._named.add(name)
            logger.warning(
                "%s has changed, and a checkpoint cannot hold it (%s): after a resume it starts over", name, why
            )

    def _places(self) -> dict[str, tuple[Holder, str]]:
        """Return the places of data by name; none twice."""
        found: dict[str, tuple[Holder, str]] = {}
        seen: set[tuple[int, str]] = set()
        for name, holder, key in self._all():
            at = (id(holder), key)
            if at not in seen and _is_kept(holder.get(key)):
                seen.add(at)
                found[name] = holder, key
        return found

    def _all(self) -> Iterator[tuple[str, Holder, str]]:
        kinds: set[type] = set()
        for part in self._parts:
            for prefix, module in _named_modules(part):
                yield from _of_module(f"model.{prefix}".removesuffix("."), module, is_saved=True)
                kinds.update(kind for kind in type(module).__mro__ if _is_of_a_task(kind))
        for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
            for method in vars(kind).values():
                if isinstance(method, FunctionType):
                    yield from _of_function(kind.__qualname__, method)
        for name, function in self._functions.items():
            yield from _of_callable(name, function)


def _is_kept(value: Any) -> bool:
    return isinstance(value, DATA) or is_generator(value) or is_holder(value)


def functions_of(task: Task) -> dict[str, Any]:
    """Return the functions of a task that may keep a state from one step to the next."""
    found: dict[str, Any] = {"loss": task.loss}
    for name, metric in task.metrics.items():
        parts = (metric.statistics, metric.value) if isinstance(metric, Metric) else (metric,)
        found |= {f"metrics.{name}" + ".value" * number: part for number, part in enumerate(parts)}
    return found


def _numbers_of(data: Any) -> dict[str, float]:
    """Return the numbers in the attributes of a data set, which rows that are read ahead may move."""
    parts = data.datasets if type(data) is ConcatDataset else [data]
    held = [(f"the data set's {type(part).__name__}.{name}", value) for part in parts for name, value in _held(part)]
    return {name: value for name, value in held if type(value) in (int, float)}


def _held(value: Any) -> Iterable[tuple[str, Any]]:
    return getattr(value, "__dict__", {}).items()


def _named_modules(part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inner: nn.Module = part.module if isinstance(part, DistributedDataParallel) else part
    yield from inner.named_modules()


def _is_of_a_task(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "atoll", "builtins", "abc", "typing")


def _of_module(path: str, module: nn.Module, *, is_saved: bool) -> Iterator[tuple[str, Holder, str]]:
    """Yield the places of a module; its buffers, and parameters, if no checkpoint of a model has them."""
    for key in list(vars(module)):
        if key not in OF_TORCH and key not in ("_buffers", "training", "forward", "real"):
            yield f"{path}.{key}", vars(module), key
    for key, _ in [*module._buffers.items()]:  # torch.jit gives a mapping that is not iterable
        if not is_saved or key in module._non_persistent_buffers_set:
            yield f"{path}.{key}", module._buffers, key
    for key, _ in () if is_saved else [*module._parameters.items()]:
        yield f"{path}.{key}", module._parameters, key


def _of_callable(path: str, value: Any) -> Iterator[tuple[str, Holder, str]]:
    if isinstance(value, Contextual):
        yield from _of_callable(path, value.function)
    elif isinstance(value, partial):
        for number, held in enumerate((value.func, *value.args, *value.keywords.values())):
            yield from _of_callable(f"{path}.{number}", held)
    elif isinstance(value, MethodType):
        yield from _of_callable(path, value.__self__)
        yield from _of_function(path, value.__func__)
    elif isinstance(value, FunctionType):
        yield from _of_function(path, value)
    else:
        yield from _of_object(path, value)


def _of_object(path: str, value: Any) -> Iterator[tuple[str, Holder, str]]:
    if isinstance(value, nn.Module):
        for prefix, module in value.named_modules():
            yield from _of_module(f"{path}.{prefix}".removesuffix("."), module, is_saved=False)
    elif hasattr(value, "__dict__") and _is_of_a_task(type(value)):
        for key in list(vars(value)):
            yield f"{path}.{key}", vars(value), key
            if isinstance(vars(value)[key], nn.Module):
                yield from _of_object(f"{path}.{key}", vars(value)[key])
        yield from _of_function(path, type(value).__call__)


def _of_function(path: str, function: Any) -> Iterator[tuple[str, Holder, str]]:
    if not isinstance(function, FunctionType) or function.__module__.partition(".")[0] in ("torch", "atoll"):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"{path}.{name}", _Cell(cell), name
    for name in function.__code__.co_names:
        if name in function.__globals__ and not name.startswith("__"):
            yield f"{function.__module__}.{name}", function.__globals__, name


class _Cell(dict[str, Any]):
    """The variable of an enclosing function, as a dictionary of one entry."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self._cell = cell

    def get(self, key: str, default: Any = None) -> Any:
        """Return the content of the closure cell, or `default` if it is empty."""
        try:
            return self._cell.cell_contents
        except ValueError:
            return default

    def __setitem__(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value


def _form(value: Any, deep: int) -> Any:
    """Encode a value in types that torch saves as weights.

    Raises:
        NoForm: a checkpoint cannot hold the value.
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter) or value.is_meta:
            raise NoForm(f"a {type(value).__name__}")
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return {"array": torch.from_numpy(value.copy())}
    if is_generator(value):
        return {"generator": _of_generator(value)}
    if not deep:
        raise NoForm("too deep")
    return _form_of_container(value, deep - 1)


def _form_of_container(value: Any, deep: int) -> Any:
    for kind in (list, tuple, deque, set):
        if type(value) is kind:
            return {kind.__name__: [_form(entry, deep) for entry in value]}
    if type(value) is dict:
        return {"dict": [[_form(key, deep), _form(entry, deep)] for key, entry in value.items()]}
    if is_holder(value):
        held = {key: entry for key, entry in vars(value).items() if _is_kept(entry)}
        return {"object": {key: _form(entry, deep) for key, entry in held.items()}}
    raise NoForm(f"a {type(value).__name__}")


def _of_generator(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        version, words, gauss = value.getstate()
        return [version, list(words), gauss]
    state = value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state(legacy=False)
    return _plain(state)


def _plain(value: Any) -> Any:
    """Return a state of numpy's generators in plain values; an integer may be too large for torch's."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return {"words": [str(word) for word in value.tolist()], "dtype": str(value.dtype)}
    return {"integer": str(value)} if isinstance(value, int) and not isinstance(value, bool) else value


def _unplain(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "words" in value:
        return np.array([int(word) for word in value["words"]], value["dtype"])
    return int(value["integer"]) if "integer" in value else {key: _unplain(entry) for key, entry in value.items()}


def _value(form: Any, present: Any) -> Any:
    """Decode a saved value, in place if the present value is of its kind: other objects may refer to that."""
    if isinstance(form, torch.Tensor):
        return _tensor(form, present)
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind == "array":
        return content.numpy()
    if kind == "generator":
        return _set_generator(present, content)
    if kind == "object":
        for key, entry in content.items() if is_holder(present) else ():
            vars(present)[key] = _value(entry, vars(present).get(key))
        return present
    old = list(present) if type(present) in (list, tuple, deque) else []
    if kind == "dict":
        old_entries = present if type(present) is dict else {}
        entries = {_value(k, None): entry for k, entry in content}
        found = {key: _value(entry, old_entries.get(key)) for key, entry in entries.items()}
        if type(present) is dict:
            present.clear()
            present.update(found)
        return present if type(present) is dict else found
    values = [_value(entry, old[n] if n < len(old) else None) for n, entry in enumerate(content)]
    made = {"list": list, "tuple": tuple, "deque": deque, "set": set}[kind]
    if kind == "tuple" or type(present) is not made:
        return made(values)
    present.clear()
    present.update(values) if kind == "set" else present.extend(values)
    return present


def _tensor(form: torch.Tensor, present: Any) -> torch.Tensor:
    if not isinstance(present, torch.Tensor):
        return form
    if present.shape == form.shape and present.dtype == form.dtype and (present.is_leaf or not present.requires_grad):
        with torch.no_grad():
            present.copy_(form)
        return present
    return form.to(present.device)


def _set_generator(present: Any, content: Any) -> Any:
    if isinstance(present, torch.Generator):
        present.set_state(content)
    elif isinstance(present, random.Random):
        present.setstate((content[0], tuple(content[1]), content[2]))
    elif isinstance(present, np.random.Generator):
        present.bit_generator.state = _unplain(content)
    elif isinstance(present, np.random.RandomState):
        present.set_state(_unplain(content))
    return present


def _encoded(form: Any) -> str:
    file = io.BytesIO()
    torch.save(form, file)
    return base64.b64encode(file.getvalue()).decode()


def _decoded(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
