"""The values of a run in the run config of an exported app. Importing this imports no flwr.

    num-server-rounds = 12
    run = "digits"                 the name and the seed of the run, which seed each training
    seed = 0
    start = "/data/model.safetensors"   the file from which the model starts, at the ServerApp, with `strict`
    frozen = "9f86..."             the digest of the tensors that are not exchanged
    local.lr = 0.1                 settings of the local training
    task.smoothing = 0.2           options of the task
    json.lr = '{"kind": ...}'      settings that are no single value, such as schedules: a run config has no tables

The values have the meaning of a run of Atoll: see `task.given`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.task.given import FROZEN, OPTION, Plain
from atoll.task.round_schedule import BOUNDED

ROUNDS = "num-server-rounds"
LOCAL, JSON = "local.", "json."


@dataclass(frozen=True, slots=True)
class RunValues:
    """The values of a run that an exported app has."""

    run: str
    """The name of the run."""
    rounds: int
    seed: int
    given: Mapping[str, Any] = field(default_factory=dict)
    """The values for the task, in the form of a run of Atoll."""
    start: str = ""
    """The file from which the model starts; empty: the task's initial values."""
    is_strict: bool = True
    """Refuse a start whose tensors differ from the model's."""

    @property
    def config(self) -> dict[str, Any]:
        """The run config, in nested tables."""
        tables: dict[str, dict[str, Any]] = {"local": {}, "task": {}, "json": {}}
        top: dict[str, Any] = {ROUNDS: self.rounds, "run": self.run, "seed": self.seed}
        if self.start:
            top |= {"start": self.start, "strict": self.is_strict}
        for key, value in self.given.items():
            if key == FROZEN:
                top["frozen"] = value
            elif key.startswith(OPTION):
                tables["task"][key.removeprefix(OPTION)] = value
            elif isinstance(value, Plain):
                tables["local"][key] = value
            else:
                tables["json"][key] = json.dumps(value)
        return top | {name: table for name, table in tables.items() if table}

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "RunValues":
        """Read a run config, which Flower gives with its tables flattened."""
        given: dict[str, Any] = {}
        for key, value in config.items():
            if key.startswith(LOCAL):
                given[key.removeprefix(LOCAL)] = value
            elif key.startswith(JSON):
                given[key.removeprefix(JSON)] = _with_rounds(json.loads(value), config[ROUNDS])
            elif key.startswith(OPTION):
                given[key] = value
        if config.get("frozen"):
            given[FROZEN] = config["frozen"]
        return cls(
            run=config["run"],
            rounds=config[ROUNDS],
            seed=config["seed"],
            given=given,
            start=config.get("start", ""),
            is_strict=config.get("strict", True),
        )


def _with_rounds(value: Any, rounds: int) -> Any:
    """Return a schedule that ends with the run's rounds, unless it has an end; any other value unchanged."""
    ends = isinstance(value, Mapping) and value.get("kind") in BOUNDED
    return {"rounds": rounds, **value} if ends else value
