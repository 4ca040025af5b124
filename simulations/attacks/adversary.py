"""One adversary with many clients: it decides what they train on, and what they send.

Everything depends on (settings, seed, names, round, client) and on what is handed in; nothing is kept between rounds,
so that a run that goes on after an interruption is attacked as it would have been.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from atoll.parallel.task.arrays import Arrays
from atoll.parallel.task.task import Task
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

DATA = frozenset({"label_flip", "backdoor"})
"""Attacks by what is trained on."""

UPDATES = frozenset({"sign_flip", "scaled_flip", "gaussian", "alie", "ipm", "backdoor", "free_rider"})
"""Attacks by what is sent."""


@dataclass(frozen=True, slots=True)
class Adversary:
    """The malicious clients of one run."""

    config: AttackConfig
    malicious: frozenset[str]
    seed: int

    @property
    def forges(self) -> bool:
        """Whether its clients send something else than they have learned, so that `updates` must be asked."""
        return self.config.kind in UPDATES and bool(self.malicious)

    @property
    def knows_all(self) -> bool:
        """Whether `updates` reads the honest clients' updates too; otherwise only those of the malicious."""
        return (self.config.knows or {"ipm": "all"}.get(self.config.kind)) == "all"

    def task(self, task: Task) -> Task:
        """The task with the malicious clients' training data poisoned; the same task where data is not attacked."""
        if self.config.kind not in DATA or not self.malicious:
            return task
        labels = self._num_labels(task) if self.config.kind == "label_flip" else 0
        if self.config.kind == "backdoor":
            self._check_trigger(task)
            self._check_target(task)
        return replace(task, data=_Data(task, self, labels))

    def _num_labels(self, task: Task) -> int:
        """As many as the settings say, or as there are; raises ConfigError where there are more than they say."""
        there, said = num_labels(task, self.malicious), self.config.num_labels
        if said is not None and said < there:
            why = f"for there is a label {there - 1}"
            raise ConfigError([f"attack.num_labels: got {said}; allowed: integer >= {there}, {why}"])
        return said or there

    def _check_trigger(self, task: Task) -> None:
        """Raises ConfigError when the first example of somebody takes no trigger; all faults at once."""
        trigger, faults = stamp(self.config), list[str]()
        held = [task.data(site, "train") for site in sorted(self.malicious)]
        for data in [*held, task.test_data() if task.test_data else None]:
            if data is not None and len(data):
                or_faults(partial(trigger.check, *first(data)), faults)
        if faults:
            raise ConfigError(list(dict.fromkeys(faults)))

    def _check_target(self, task: Task) -> None:
        """Raises ConfigError when nobody has the label that a trigger is to cause: a loss may not know it."""
        target = self.config.target
        if not target or target < num_labels(task, self.malicious, attack="backdoor"):
            return
        if target >= (there := num_labels(task, task.sites, attack="backdoor")):
            raise ConfigError([f"attack.target: got {target}; allowed: a label of the data, 0 to {there - 1}"])

    def updates(
        self, round_id: int, honest: Mapping[str, Arrays], version: Arrays, previous: Arrays | None = None
    ) -> dict[str, Arrays]:
        """What the malicious clients among them send.

        Args:
            round_id: of the round; noise is drawn for each round and client anew.
            honest: by client, what everyone who reports in this round has honestly learned. A mapping that reads an
                update when it is asked for is enough: at most two passes, one update at a time.
            version: the global model that they trained from.
            previous: the version before it, of which a free rider makes its step; None: it sends zeros.

        Returns:
            Updates of the malicious clients, by client; float tensors are float32, integers as they honestly are.
        """
        present = sorted(self.malicious.intersection(honest))
        if not self.forges or not present:
            return {}
        known = None
        if self.config.kind in ("alie", "ipm"):
            # an adversary who knows all knows the honest ones: these are what it imitates or turns around
            seen = sorted(set(honest) - self.malicious) if self.knows_all else present
            known = moments(_Some(honest, seen or present))
        step = _difference(version, previous) if self.config.kind == "free_rider" else None
        forge = _Round(self, round_id, len(honest), len(present), known, step)
        return {client: forge.update(client, honest[client]) for client in present}

    def rng(self, *purpose: object) -> np.random.Generator:
        """Randomness of its own for each purpose."""
        name = " ".join(map(str, ("atoll attack", self.seed, *purpose)))
        return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16]))


@dataclass(frozen=True, slots=True)
class _Round:
    """What the adversary has before it in one round."""

    adversary: Adversary
    round_id: int
    num_clients: int
    num_malicious: int
    known: Moments | None
    step: Arrays | None

    def update(self, client: str, own: Arrays) -> Arrays:
        config, rng = self.adversary.config, self.adversary.rng("update", self.round_id, client)
        match config.kind:
            case "sign_flip":
                return scaled(own, -1.0)
            case "scaled_flip":
                return scaled(own, -(config.factor or 10.0))
            case "backdoor":
                return scaled(own, config.factor or self.num_clients / self.num_malicious)
            case "gaussian":
                return gaussian(own, config.sigma or 1.0, rng)
            case "free_rider":
                return free_ride(own, self.step, config.disguise or "step", rng)
        assert self.known is not None
        if config.kind == "ipm":
            return inner_product(own, self.known, config.epsilon or 2.0)
        z = little_is_enough_z(self.num_clients, self.num_malicious) if config.z is None else config.z
        return little_is_enough(own, self.known, z)


class _Some(Mapping[str, Arrays]):
    """Some of a mapping, each read when it is asked for."""

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
    """`Task.data` with the malicious clients' training split poisoned."""

    task: Task
    adversary: Adversary
    num_labels: int

    def __call__(self, site: str, split: str) -> Any:
        data = self.task.data(site, split)
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
    """One more than the largest label in the training data of these clients and in the server's test data.

    Args:
        task: whose data is read.
        sites: the clients.
        attack: which needs labels.

    Raises:
        ConfigError: the targets are no labels.
    """
    held = [task.data(site, "train") for site in sorted(sites)]
    largest = 0
    for data in [*held, task.test_data() if task.test_data else None]:
        if data is not None and len(data):
            targets = everything(data)[1]
            check_labels(targets, attack)
            largest = max(largest, int(targets.max()))
    return largest + 1
