"""The context of a task's functions: site, round, version, and the values of the run and the site for the task.

A function of a `Task` that has a parameter named `context` gets the `Context` of its call:

    def loss(outputs, targets, context):
        return cross_entropy(outputs, targets, label_smoothing=context.options["smoothing"])

Importing this file does not import torch.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from atoll.task.deadline import Deadline
from atoll.task.noise import Noise

if TYPE_CHECKING:
    from atoll.ground.noise.generator import SecretGenerator

NAME = "context"
"""The name of the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The circumstances of a call of a task's function."""

    site: str | None = None
    """The owner of the data; None: the server's data, a model for all sites, a centralized training."""

    round: int = 0
    """The number of the round, 1, 2, 3, ...; 0: no round is trained, as in an evaluation or a centralized training."""

    version: int = 0
    """The version of the global model that is trained or measured."""

    seed: int = 0
    """The seed of all randomness in a training, a function of (run, round, client); elsewhere the run's seed."""

    deadline: Deadline = field(default_factory=Deadline.never)
    """The end of a training."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """The values of `Task.options`, overridden by the run's `[task]` table."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """The values of `Task.settings`, overridden by the `[task]` table of the site's `agent.toml`. They stay at the
    site."""

    noise: Noise = field(default_factory=Noise, repr=False, compare=False)
    """The source of `secret_rng`."""

    @property
    def secret_rng(self) -> "SecretGenerator":
        """The generator of secret noise, as for local differential privacy.

        It is a `numpy.random.Generator` for this call, with `fill_normal_` for a tensor: seeded from a secret of the
        state directory, different for each use, and unknown elsewhere. The global generators
        of Python, numpy and torch follow from public seeds. In a simulation and in a centralized training this one
        does, too.
        """
        return self.noise.generator(self.seed, self.round, self.version, self.site or "")


_current: ContextVar[Context | None] = ContextVar("context", default=None)


@contextmanager
def within(context: Context) -> Iterator[None]:
    """Set the context that the task's functions get when this thread calls them in the block."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def context_of(task: Any, **circumstances: Any) -> Context:
    """Make a context with the options and settings of a task, and the given fields."""
    options, settings = getattr(task, "options", {}), getattr(task, "settings", {})
    of_site = getattr(task, "site_settings", {}).get(circumstances.get("site"), {})
    return Context(options=options, settings={**settings, **of_site}, **circumstances)


class Contextual:
    """A function that takes the context, called without it.

    Args:
        function: has a parameter `context`.
        otherwise: the context of a call outside of any, with the options and settings of its task.
    """

    def __init__(self, function: Callable[..., Any], otherwise: Context) -> None:
        self.function, self._otherwise = function, otherwise

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the function with the present context as its `context`, and return its result."""
        return self.function(*args, **named, context=_current.get() or self._otherwise)


def contextual(function: Any, otherwise: Context) -> Any:
    """Return a function that gets the present context if it takes one; any other object unchanged."""
    if isinstance(function, Contextual):
        function = function.function
    return Contextual(function, otherwise) if takes_context(function) else function


def takes_context(function: Any) -> bool:
    """Return whether a callable has a parameter `context` that is not bound yet."""
    if not callable(function):
        return False
    if isinstance(function, partial) and NAME in function.keywords:
        return False
    try:
        return NAME in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def depends_on_context(task: Any) -> bool:
    """Return whether the training of a `Task` by the built-in loop depends on the context."""
    functions = [task.loss, *(getattr(metric, "statistics", metric) for metric in task.metrics.values())]
    return any(isinstance(function, Contextual) for function in functions)
