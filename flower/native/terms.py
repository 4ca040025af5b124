"""The settings of a run that a Flower app's `main()` gives: they are sent to clients in the run's `[local]` table.

    "train.lr" = 0.1                  the train config
    "evaluate.batch" = 64             the evaluate config
    "flower.order" = ["w", "b"]       the app's order of the arrays, unless they are sorted by name
    "flower.casts" = ["w=float64"]    the app's dtype of each array that is sent in another dtype
    "flower.arrays" = "arrays"        the names of the records in messages, and of the weight in replies
    "flower.config" = "config"
    "flower.weight" = "num-examples"

Importing this file imports no flwr.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.ground.faults import Refused
from atoll.task.given import Given

TRAIN, EVALUATE, OWN = "train.", "evaluate.", "flower."


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings of a Flower app's run that its clients need."""

    train: Mapping[str, Any] = field(default_factory=dict)
    """The train config of `Strategy.start`."""
    evaluate: Mapping[str, Any] = field(default_factory=dict)
    """The evaluate config."""
    order: tuple[str, ...] = ()
    """The arrays in the app's order; empty: in the order of their names."""
    casts: Mapping[str, str] = field(default_factory=dict)
    """The app's dtype of each array that is sent in another dtype."""
    arrays: str = "arrays"
    """The name of the record of arrays in a message."""
    config: str = "config"
    """The name of the record of the config in a message."""
    weight: str = "num-examples"
    """The name of the weight in the metrics of a reply."""

    @property
    def table(self) -> dict[str, Any]:
        """The settings as a run's `[local]` table, without its defaults."""
        default = Terms()
        own: dict[str, Any] = {
            f"{OWN}{name}": getattr(self, name)
            for name in ("arrays", "config", "weight")
            if getattr(self, name) != getattr(default, name)
        }
        if self.order:
            own[f"{OWN}order"] = list(self.order)
        if self.casts:
            own[f"{OWN}casts"] = [f"{name}={dtype}" for name, dtype in self.casts.items()]
        configs = {f"{TRAIN}{key}": value for key, value in self.train.items()}
        return configs | {f"{EVALUATE}{key}": value for key, value in self.evaluate.items()} | own

    @classmethod
    def read(cls, given: Given) -> "Terms":
        """Parse the settings from the values that a run gives to its task.

        Raises:
            ValueError: unknown keys; the message lists all of them.
        """
        own: dict[str, Any] = {}
        configs: dict[str, dict[str, Any]] = {TRAIN: {}, EVALUATE: {}}
        unknown = []
        for key, value in given.overrides(1).items():
            prefix = key[: key.find(".") + 1]
            if prefix in configs:
                configs[prefix][key.removeprefix(prefix)] = value
            elif prefix == OWN and key.removeprefix(OWN) in ("arrays", "config", "weight", "order", "casts"):
                own[key.removeprefix(OWN)] = value
            else:
                unknown.append(f"local.{key}: unknown key (known: train.NAME and evaluate.NAME of the configs)")
        if unknown:
            raise Refused(*unknown)
        own["casts"] = dict(text.rpartition("=")[::2] for text in own.get("casts", ()))
        own["order"] = tuple(own.get("order", ()))
        return cls(configs[TRAIN], configs[EVALUATE], **own)

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Return names of arrays in the app's order."""
        return list(self.order) or by_name(names)


def by_name(names: Iterable[str]) -> list[str]:
    """Return names in order; numbers, as in lists of arrays, by value."""
    return sorted(names, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))


def order_to_send(names: Collection[str]) -> tuple[str, ...]:
    """Return the order of an app's arrays if it has to be sent; empty: they are sorted by name."""
    return () if list(names) == by_name(names) else tuple(names)
