"""The noise of Flower's differential privacy, drawn from a secret in place of numpy's global generator.

Flower's mods and wrappers call `np.random.normal` in Flower's modules. Here the name `np` of these modules is replaced
by numpy with another `normal`, so a seed that the app sets has no effect. Other random numbers of an app with such a
mod or wrapper are seeded from the secret, too. Without a secret, as in a simulation, all is as in Flower.

There is one for a process, like numpy's generator: a worker and a program run one app.
"""

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Context

from atoll.task.noise import Noise
from atoll.task.randomness import seed_everything, seed_from

if TYPE_CHECKING:
    from atoll.ground.noise.generator import SecretGenerator

DRAWING = re.compile(r"flwr\..*\b(differential_privacy|dp|dp_\w+|dpfedavg_\w+|localdp_mod)")
"""The modules of Flower that draw noise; `tests/flower/test_secret_noise.py` looks for others."""

CLASSES = re.compile(r"LocalDpMod|DifferentialPrivacy\w+|DPFedAvg\w+")

Source = Callable[[], "SecretGenerator"]


class FlowerNoise:
    """The noise of one process; see the module."""

    def __init__(self) -> None:
        self._source: Source | None = None
        self.load()

    def load(self) -> None:
        """Forget the previous app: until the next job begins, another app is being loaded."""
        self._is_loading, self._is_seeded = True, False
        self._is_drawn = False  # whether the loaded app has a mod or wrapper

    def begin(self, source: Source | None, seed: int | None) -> None:
        """Seed all generators for a job of an app that is loaded.

        Args:
            source: returns the generator of the job's noise; None: there is no secret.
            seed: the seed of the generators, unless the app draws noise from a secret; None: they are seeded already.
        """
        self._source, self._is_seeded, self._is_loading = source, False, False
        if seed is not None:
            seed_everything(seed)
        if self._is_drawn:
            self._seed()

    def made(self) -> None:
        """Register a mod or wrapper: of the whole app while it is loaded, or of a job that makes one."""
        if self._is_loading:
            self._is_drawn = True
        elif not self._is_seeded:
            self._seed()

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        """Return the noise in place of `np.random.normal`."""
        draw = np.random.normal if self._source is None else self._source().normal
        return draw(loc, scale, size)

    def _seed(self) -> None:
        self._is_seeded = True
        if self._source is None:
            Noise.on_public()
        else:
            seed_from(self._source())


@cache
def flower_noise() -> FlowerNoise:
    """Return the noise of this process; the first call, before an app is loaded, replaces Flower's."""
    noise = FlowerNoise()
    for kind in _classes():
        kind.__init__ = _noted(kind.__init__, noise)
    stand_in = _Over(np, random=_Over(np.random, normal=noise.normal))
    for name, module in [*sys.modules.items()]:
        if DRAWING.fullmatch(name) and getattr(module, "np", None) is np:
            module.np = stand_in  # type: ignore[attr-defined]
    return noise


def _classes() -> Iterator[Any]:
    import flwr.client.mod
    import flwr.clientapp.mod
    import flwr.server.strategy
    import flwr.serverapp.strategy

    modules: tuple[Any, ...] = (flwr.client.mod, flwr.clientapp.mod, flwr.server.strategy, flwr.serverapp.strategy)
    found = (value for module in modules for name, value in vars(module).items() if CLASSES.fullmatch(name))
    yield from dict.fromkeys(found)


def _noted(begin: Callable[..., None], noise: FlowerNoise) -> Callable[..., None]:
    @wraps(begin)
    def begun(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        noise.made()

    return begun


_Context: Any = Context  # flwr may not be installed where types are checked


class NoisyContext(_Context):  # type: ignore[misc]
    """The context of an app, with the generator of its secret noise as `secret_rng`."""

    source: Source

    @property
    def secret_rng(self) -> "SecretGenerator":
        """The generator of secret noise, with the meaning of `task.context.Context.secret_rng`."""
        return self.source()


class _Over:
    """A module with replaced values of some names."""

    def __init__(self, module: Any, **values: Any) -> None:
        self._module = module
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
