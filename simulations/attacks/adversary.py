"""The adversary that controls the malicious clients: their training data and the updates that they send.

All results depend on (settings, seed, names, round, client) and on the arguments alone. There is no state between
rounds, so an attack on a resumed run continues as it would have without the interruption.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from atoll.protocol.settings import ConfigError, or_faults
from atoll.simulations.attacks.backdoor import stamp
from atoll.simulations.attacks.config import AttackConfig
from atoll.simulations.attacks.poison import Flip, check_labels, everything, first, poisoned
from atoll.simulations.attacks.updates import (
    Moments,
    free_ride,
    gaussian,
    inner_product,
    little_is_enough,
    little_is_enough_z,
    moments,
    scaled,
)
from atoll.task.arrays import Arrays
from atoll.task.randomness import data_of, server_data_of
from atoll.task.task import Task

DATA = frozenset({"label_flip", "backdoor"})
"""Attacks on the training data."""

UPDATES = frozenset({"sign_flip", "scaled_flip", "gaussian", "alie", "ipm", "backdoor", "free_rider"})
"""Attacks on the updates that are sent."""


@dataclass(frozen=True, slots=True)
class Adversary:
    """Adversary of one run, who controls its malicious clients."""

    config: AttackConfig
    malicious: frozenset[str]
    seed: int

    @property
    def forges(self) -> bool:
        """Return whether malicious clients replace their trained updates, so that `updates` is needed."""
        return self.config.kind in UPDATES and bool(self.malicious)

    @property
    def knows_all(self) -> bool:
        """Return whether `updates` also reads the honest clients' updates."""
        return (self.config.knows or {"ipm": "all"}.get(self.config.kind)) == "all"

    def task(self, task: Task) -> Task:
        """Return the task with poisoned training data of the malicious clients; without such an attack, the same task.

        Raises:
            ConfigError: the data has more labels than `num_labels`; it takes no trigger or no target label.
        """
        if self.config.kind not in DATA or not self.malicious:
            return task
        labels = self._num_labels(task) if self.config.kind == "label_flip" else 0
        if self.config.kind == "backdoor":
            self._check_trigger(task)
            self._check_target(task)
        return replace(task, data=_Data(task, self, labels))

    def _num_labels(self, task: Task) -> int:
        """Return the configured number of labels, or the data's; raise ConfigError if the data has more."""
        found, configured = num_labels(task, self.malicious), self.config.num_labels
        if configured is not None and configured < found:
            why = f"because the data has a label {found - 1}"
            raise ConfigError([f"attack.num_labels: got {configured}; allowed: integer >= {found}, {why}"])
        return configured or found

    def _check_trigger(self, task: Task) -> None:
        """Check that the first example of each data set takes the trigger; raise ConfigError with all faults."""
        trigger, faults = stamp(self.config), list[str]()
        training_sets = [data_of(task, site, "train") for site in sorted(self.malicious)]
        for data in [*training_sets, server_data_of(task)]:
            if data is not None and len(data):
                or_faults(partial(trigger.check, *first(data)), faults)
        if faults:
            raise ConfigError(list(dict.fromkeys(faults)))

    def _check_target(self, task: Task) -> None:
        """Check that some data has the target label, because a loss may fail on others; raise ConfigError if not."""
        target = self.config.target
        if not target or target < num_labels(task, self.malicious, attack="backdoor"):
            return
        if target >= (found := num_labels(task, task.sites, attack="backdoor")):
            raise ConfigError([f"attack.target: got {target}; allowed: a label of the data, 0 to {found - 1}"])

    def updates(
        self, round_id: int, honest: Mapping[str, Arrays], version: Arrays, previous: Arrays | None = None
    ) -> dict[str, Arrays]:
        """Return the updates that the malicious clients of a round send.

        Args:
            round_id: the round; noise differs for each round and client.
            honest: by client, the honestly trained update of every client that reports in this round. The mapping may
                read each update on access: there are at most two passes, with one update at a time.
            version: the global model that the clients trained from.
            previous: the version before it, for the step of a free rider; None: a free rider sends zeros.

        Returns:
            The malicious clients' updates by client; float tensors as float32, integer tensors as honestly trained.
        """
        present = sorted(self.malicious.intersection(honest))
        if not self.forges or not present:
            return {}
        known = None
        if self.config.kind in ("alie", "ipm"):
            # full knowledge is of the honest clients' updates: the attack imitates or reverses these
            seen = sorted(set(honest) - self.malicious) if self.knows_all else present
            known = moments(_Some(honest, seen or present))
        step = _difference(version, previous) if self.config.kind == "free_rider" else None
        forge = _Round(self, round_id, len(honest), len(present), known, step)
        return {client: forge.update(client, honest[client]) for client in present}

    def rng(self, *purpose: object) -> np.random.Generator:
        """Return an independent random generator for a purpose."""
        name = " ".join(map(str, ("atoll attack", self.seed, *purpose)))
        return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16]))


@dataclass(frozen=True, slots=True)
class _Round:
    """The adversary's knowledge in one round."""

    adversary: Adversary
    round_id: int
    num_clients: int
    num_malicious: int
    known: Moments | None
    step: Arrays | None

    def update(self, client: str, honest: Arrays) -> Arrays:
        config, rng = self.adversary.config, self.adversary.rng("update", self.round_id, client)
        match config.kind:
            case "sign_flip":
                return scaled(honest, -1.0)
            case "scaled_flip":
                return scaled(honest, -(config.factor or 10.0))
            case "backdoor":
                return scaled(honest, config.factor or self.num_clients / self.num_malicious)
            case "gaussian":
                return gaussian(honest, config.sigma or 1.0, rng)
            case "free_rider":
                return free_ride(honest, self.step, config.disguise or "step", rng)
        assert self.known is not None
        if config.kind == "ipm":
            return inner_product(honest, self.known, config.epsilon or 2.0)
        z = little_is_enough_z(self.num_clients, self.num_malicious) if config.z is None else config.z
        return little_is_enough(honest, self.known, z)


class _Some(Mapping[str, Arrays]):
    """Some items of a mapping, each read on access."""

    def __init__(self, whole: Mapping[str, Arrays], names: list[str]) -> None:
        self._whole, self._names = whole, names

    def __getitem__(self, name: str) -> Arrays:
        return self._whole[name]

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _difference(version: Arrays, previous: Arrays | None) -> Arrays | None:
    if previous is None:
        return None
    both = version.keys() & previous.keys()
    return {name: version[name].astype(np.float64) - previous[name].astype(np.float64) for name in both}


@dataclass(frozen=True, slots=True)
class _Data:
    """`Task.data` with poisoned training splits of the malicious clients."""

    task: Task
    adversary: Adversary
    num_labels: int

    def __call__(self, site: str, split: str) -> Any:
        data = data_of(self.task, site, split)
        if data is None or split != "train" or site not in self.adversary.malicious:
            return data
        config = self.adversary.config
        if config.kind == "label_flip":
            return poisoned(data, Flip(self.num_labels))
        share = 0.5 if config.poisoned is None else config.poisoned
        count = max(1, round(share * len(data)))
        chosen = np.zeros(len(data), bool)
        chosen[self.adversary.rng("poison", site).permutation(len(data))[:count]] = True
        return poisoned(data, stamp(config), chosen)


def num_labels(task: Task, sites: Iterable[str], *, attack: str = "label_flip") -> int:
    """Return one more than the largest label in the training data of some clients and in the server's test data.

    Args:
        task: the task that has the data.
        sites: the clients.
        attack: the attack that needs labels, for the message.

    Raises:
        ConfigError: the targets are not labels.
    """
    training_sets = [data_of(task, site, "train") for site in sorted(sites)]
    largest = 0
    for data in [*training_sets, server_data_of(task)]:
        if data is not None and len(data):
            targets = everything(data)[1]
            check_labels(targets, attack)
            largest = max(largest, int(targets.max()))
    return largest + 1
