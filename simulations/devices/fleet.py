"""The devices of all clients of a simulated run, as arrays of a few dozen bytes per client.

download   latency_s + bytes / down_bytes_per_s
training   examples / examples_per_s, or round_s for any number of examples
upload     latency_s + bytes / up_bytes_per_s
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.simulations.devices.availability import Availability


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one client."""

    examples_per_s: float
    """Speed of training; each pass over an example counts."""
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float
    """Seconds before the first byte of a transfer, in either direction."""
    round_s: float | None = None
    """Seconds of a round's training, independent of the size of the data; None: `examples_per_s` applies."""

    def download_seconds(self, num_bytes: int) -> float:
        """Return the seconds until the last byte arrives."""
        return self.latency_s + num_bytes / self.down_bytes_per_s

    def train_seconds(self, num_examples: int) -> float:
        """Return the seconds of a round's training; `num_examples` is the client's examples times its epochs."""
        return num_examples / self.examples_per_s if self.round_s is None else self.round_s

    def upload_seconds(self, num_bytes: int) -> float:
        """Return the seconds until the last byte arrives."""
        return self.latency_s + num_bytes / self.up_bytes_per_s


@dataclass(frozen=True, slots=True)
class Speeds:
    """The fields of `Device` as columns (clients,)."""

    examples_per_s: NDArray[np.float64]
    down_bytes_per_s: NDArray[np.float64]
    up_bytes_per_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    round_s: NDArray[np.float64] | None = None

    def slowed(self, factors: NDArray[np.float64]) -> "Speeds":
        """Return devices whose training takes longer by a factor for each client (clients,)."""
        round_s = None if self.round_s is None else self.round_s * factors
        return replace(self, examples_per_s=self.examples_per_s / factors, round_s=round_s)


class Fleet(Mapping[str, Device]):
    """The device and the availability of each client, by the client's name.

    Time is in virtual seconds since the start of the run. An unknown name raises KeyError.
    """

    def __init__(
        self, names: Iterable[str], speeds: Speeds, availability: Availability, stragglers: NDArray[np.bool_]
    ) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self.speeds = speeds
        """Speeds in the order of the names; stragglers are already slowed."""
        self.availability = availability
        self.stragglers = stragglers
        """Mask of the stragglers (clients,), in the order of the names."""

    def __getitem__(self, client_id: str) -> Device:
        speeds, at = self.speeds, self._places[client_id]
        return Device(
            float(speeds.examples_per_s[at]),
            float(speeds.down_bytes_per_s[at]),
            float(speeds.up_bytes_per_s[at]),
            float(speeds.latency_s[at]),
            None if speeds.round_s is None else float(speeds.round_s[at]),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def is_always_awake(self) -> bool:
        """Return whether all clients are always awake."""
        return not len(self.availability.begins)

    def is_awake(self, client_id: str, t: float) -> bool:
        """Return whether the client can be invited at `t`."""
        return self.availability.is_awake(self._places[client_id], t)

    def next_change(self, client_id: str, t: float) -> float | None:
        """Return the first time after `t` at which the client falls asleep or wakes up; None: never."""
        return self.availability.next_change(self._places[client_id], t)
