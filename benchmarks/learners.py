"""The models and data of `simulation`, and the protocol of its sides, which are processes that run rounds on demand.

    to the side     run SECONDS       run rounds for this time
                    end               report the accuracy, and exit
    from the side   @ {json}          ready; then {"rounds", "seconds"} for each `run`; at last {"accuracy"}

The module imports only torch, so that the peers' Python can load it.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.tight_loops import SETTINGS, Client

MARK = "@ "

LR, BATCH_SIZE = 0.1, 10

TESTED = 1000
"""The number of examples that no client trains on."""

LEARNED = 0.3
"""The least accuracy of a side that learns, after `ROUNDS_MIN` rounds; chance is 0.1."""

ROUNDS_MIN = 10
"""The least number of rounds of each side, timed or not."""


def examples(features: int, count: int, seed: int) -> Client:
    """Return examples of ten patterns with noise, on which a few rounds show whether a side learns."""
    pictures = torch.randn(10, features, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(10, (count,), generator=generator)
    noise = torch.randn(count, features, generator=generator)
    return 0.5 * (pictures[targets] + noise), targets


@cache
def clients_of(name: str) -> list[Client]:
    """Return the data of all clients of a setting, made once in a process."""
    _, features, num_clients, each, _ = SETTINGS[name]
    inputs, targets = examples(features, num_clients * each, seed=1)
    return list(zip(inputs.split(each), targets.split(each), strict=True))


def model_of(name: str) -> nn.Module:
    """Return the model of a setting, the same on every side."""
    torch.manual_seed(1)
    return SETTINGS[name][0]()


@torch.no_grad()
def accuracy(name: str, weights: Sequence[torch.Tensor]) -> float:
    """Return the accuracy of a model with these parameters on examples that no client has trained on."""
    model = model_of(name)
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.copy_(value)
    inputs, targets = examples(SETTINGS[name][1], TESTED, seed=2)
    return float((model(inputs).argmax(1) == targets).float().mean())


class RoundRequests:
    """The requests of the benchmark for rounds, as the side reads them from standard input."""

    def __init__(self) -> None:
        self._until, self._began, self._rounds, self._every = 0.0, 0.0, -1, -1
        self._is_ending = False

    def another(self, clock: Callable[[], float] = time.perf_counter) -> bool:
        """Wait for a command, and return whether to run another round; called before the first round and after each."""
        now = clock()
        self._rounds, self._every = self._rounds + 1, self._every + 1
        if self._is_ending:
            return self._every < ROUNDS_MIN
        if now < self._until:
            return True
        if self._until:
            say(rounds=self._rounds, seconds=now - self._began)
        else:
            say(ready=True)
        word, *rest = (sys.stdin.readline() or "end").split()
        if word == "end":
            self._is_ending = True
            return self._every < ROUNDS_MIN
        self._rounds, self._began = 0, clock()
        self._until = self._began + float(rest[0])
        return True


def say(**what: Any) -> None:
    """Send a line to the benchmark."""
    print(MARK + json.dumps(what), flush=True)
