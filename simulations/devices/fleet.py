"""The devices of all clients of a simulated run, as arrays: a few dozen bytes for each client.

download   latency_s + bytes / down_bytes_per_s
training   examples / examples_per_s, or round_s whatever the examples
upload     latency_s + bytes / up_bytes_per_s
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.simulations.devices.awake import Awake


@dataclass(frozen=True, slots=True)
class Device:
    """What one client runs on."""

    examples_per_s: float
    """Of training: each pass over an example counts."""
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float
    """Before the first byte of a transfer, in either direction."""
    round_s: float | None = None
    """What the whole of a round's training takes, whatever the size of the data; None: as `examples_per_s` says."""

    def download_seconds(self, num_bytes: int) -> float:
        """Until the last byte is there."""
        return self.latency_s + num_bytes / self.down_bytes_per_s

    def train_seconds(self, num_examples: int) -> float:
        """Of the whole of a round's training: `num_examples` are the client's examples times its epochs."""
        return num_examples / self.examples_per_s if self.round_s is None else self.round_s

    def upload_seconds(self, num_bytes: int) -> float:
        """Until the last byte is there."""
        return self.latency_s + num_bytes / self.up_bytes_per_s


@dataclass(frozen=True, slots=True)
class Speeds:
    """Columns (clients,), each as the field of `Device`."""

    examples_per_s: NDArray[np.float64]
    down_bytes_per_s: NDArray[np.float64]
    up_bytes_per_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    round_s: NDArray[np.float64] | None = None

    def slowed(self, times: NDArray[np.float64]) -> "Speeds":
        """The same devices, of which each trains so many times as long (clients,)."""
        whole = None if self.round_s is None else self.round_s * times
        return replace(self, examples_per_s=self.examples_per_s / times, round_s=whole)


class Fleet(Mapping[str, Device]):
    """Every client's device by the client's name, and when it is awake.

    Time is in virtual seconds since the start of the run. An unknown name raises KeyError.
    """

    def __init__(self, names: Iterable[str], speeds: Speeds, awake: Awake, stragglers: NDArray[np.bool_]) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self.speeds = speeds
        """In the order of the names."""
        self.awake = awake
        self.stragglers = stragglers
        """Who is one, in the order of the names; their speed has it in it already."""

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

    def is_straggler(self, client_id: str) -> bool:
        """Whether the client is one of those that train so much slower."""
        return bool(self.stragglers[self._places[client_id]])

    @property
    def is_always_awake(self) -> bool:
        """Whether nobody ever sleeps."""
        return not len(self.awake.begins)

    def is_awake(self, client_id: str, t: float) -> bool:
        """Whether the client can be asked at `t`."""
        return self.awake.is_awake(self._places[client_id], t)

    def next_change(self, client_id: str, t: float) -> float | None:
        """The first instant after `t` at which the client falls asleep or wakes up; None: it never does."""
        return self.awake.next_change(self._places[client_id], t)
