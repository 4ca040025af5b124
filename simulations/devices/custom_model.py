"""A custom device model: a function that returns the device of one client."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from atoll.plugins.guard import called
from atoll.plugins.kind import Kind
from atoll.protocol.settings import ConfigError, Plain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from atoll.simulations.devices.fleet import Speeds

CUSTOM_DEVICE = Kind(
    name="device model",
    group="atoll.devices",
    setting="devices.model",
    allowed="a function of (client, rng)",
    failed=ConfigError,
    form="function",
)

FIELDS: Mapping[str, str] = {
    "examples_per_s": "examples_per_s",
    "seconds_per_round": "round_s",
    "down_bytes_per_s": "down_bytes_per_s",
    "up_bytes_per_s": "up_bytes_per_s",
    "latency_s": "latency_s",
}
"""Values that a model may return, with the columns of `Speeds` that they replace."""


def replaced(speeds: "Speeds", model: str, options: Mapping[str, Plain], names: Sequence[str], seed: int) -> "Speeds":
    """Return the speeds with the columns replaced that the user's function returns.

    The function is called for one client at a time, with a generator derived from the seed and the client's name: a
    device does not depend on the other clients.

    Args:
        speeds: the speeds by the settings.
        model: the function, by the name of a package or by a reference.
        options: its keyword arguments.
        names: the names of the clients.
        seed: the seed of the run.

    Raises:
        ConfigError: there is no such function, it raised, or its result is not a device.
    """
    import numpy as np

    function = CUSTOM_DEVICE.load(model)
    found: list[Mapping[str, float]] = []
    for name in names:
        named = f"devices.model: {model} for client {name!r}"
        answer = called(named, function, name, _generator(name, seed), failed=ConfigError, options=options)
        if found and isinstance(answer, Mapping) and answer.keys() != found[0].keys():
            raise ConfigError(f"{named} gave {_listed(answer)}, and {_listed(found[0])} for client {names[0]!r}")
        found.append(_checked(answer, named))
    columns: dict[str, NDArray[np.float64] | None] = {}
    for key in found[0] if found else ():
        if key == "examples_per_s":
            columns["round_s"] = None
        columns[FIELDS[key]] = np.array([float(each[key]) for each in found])
    return replace(speeds, **cast(Any, columns))


def _checked(answer: Any, named: str) -> Mapping[str, float]:
    """Return the values of a device; raise ConfigError, with the name of the call, if they are not valid."""
    import numpy as np

    if not isinstance(answer, Mapping) or not answer or not answer.keys() <= FIELDS.keys():
        gave = _listed(answer) if isinstance(answer, Mapping) else type(answer).__name__
        raise ConfigError(f"{named} gave {gave}; allowed: a table with one or more of {', '.join(FIELDS)}")
    if {"examples_per_s", "seconds_per_round"} <= answer.keys():
        raise ConfigError(f"{named} gave both examples_per_s and seconds_per_round; allowed: one of them")
    for key, value in answer.items():
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        least = 0.0 if key == "latency_s" else math.nextafter(0.0, 1.0)
        if not is_number or not least <= value < math.inf:
            raise ConfigError(f"{named} gave {key} = {value!r}; allowed: a number {'>=' if not least else '>'} 0")
    return answer


def _listed(answer: Mapping[str, Any]) -> str:
    return ", ".join(map(str, answer)) or "an empty table"


def _generator(name: str, seed: int) -> "np.random.Generator":
    import numpy as np

    digest = hashlib.blake2b(name.encode(), key=seed.to_bytes(8, "little"), person=b"atoll own model", digest_size=16)
    return np.random.default_rng(int.from_bytes(digest.digest(), "little"))
