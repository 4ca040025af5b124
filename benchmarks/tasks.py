"""The tasks of the benchmarks, which need only numpy, so that a worker starts in 0.1 s."""

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from atoll.task.array_task import Instructions, Trained

Arrays = dict[str, np.ndarray[Any, Any]]


class Empty:
    """A model of four numbers, so that a round has only the cost of the protocol."""

    def initial(self, seed: int) -> Arrays:
        """Return four zeros."""
        return {"w": np.zeros(4, np.float32)}

    def train(self, parameters: Arrays, instructions: Instructions) -> Trained:
        """Add one to each number."""
        return Trained({"w": np.ones(4, np.float32)}, num_examples=1)


class Noise:
    """A model whose updates are noise, determined by seed, site and round to the bit.

    It has `ATOLL_BENCH_ELEMENTS` float32 in two tensors, so that a transfer can end within a tensor; a training takes
    `ATOLL_BENCH_TRAIN_S` seconds.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._num_elements = int(environment.get("ATOLL_BENCH_ELEMENTS", "100000"))
        self._train_s = float(environment.get("ATOLL_BENCH_TRAIN_S", "0"))

    def initial(self, seed: int) -> Arrays:
        """Return noise determined by the seed, and a counter."""
        return {**self._noise(seed), "rounds": np.zeros((), np.int64)}

    def train(self, parameters: Arrays, instructions: Instructions) -> Trained:
        """Return noise determined by site, round and global model; any other model gives other noise."""
        time.sleep(self._train_s)
        noise = self._noise(instructions.seed)
        update: Arrays = {name: values - np.float32(0.1) * parameters[name] for name, values in noise.items()}
        update["rounds"] = np.ones((), np.int64)
        return Trained(update, num_examples=1 + instructions.seed % 1000)

    def _noise(self, seed: int) -> Arrays:
        generator = np.random.default_rng(seed)
        first = self._num_elements // 3
        return {
            "a": generator.standard_normal(first, np.float32),
            "b": generator.standard_normal(self._num_elements - first, np.float32),
        }


class Measured(Noise):
    """Noise whose sites measure each version: site a 1, b 2, c 4, ..., so that a sum of some tells which they are."""

    def evaluate(self, parameters: Arrays, *, split: str, site: str | None) -> dict[str, tuple[float, float]] | None:
        """Return the loss of a site, and one example."""
        return None if site is None or split != "test" else {"loss": (float(1 << ord(site[0]) - ord("a")), 1.0)}


class Plus:
    """The exchange of `exchange_flower_app`: ten tensors of noise, to which each client adds a random number.

    The model has `ATOLL_BENCH_ELEMENTS` float32. The update differs between clients and rounds.
    """

    NUM_TENSORS = 10

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._num_elements = int(environment.get("ATOLL_BENCH_ELEMENTS", "100000"))

    def initial(self, seed: int) -> Arrays:
        """Return noise determined by the seed."""
        generator, count = np.random.default_rng(seed), self._num_elements // self.NUM_TENSORS
        return {f"w{number}": generator.standard_normal(count, np.float32) for number in range(self.NUM_TENSORS)}

    def train(self, parameters: Arrays, instructions: Instructions) -> Trained:
        """Add one number in one pass over the model."""
        offset = np.float32(1e-3 * (1 + instructions.seed % 1009))
        scale = np.float32(1 / 1024)
        update: Arrays = {name: scale * values + offset for name, values in parameters.items()}
        return Trained(update, num_examples=10)


empty = Empty()
plus = Plus(os.environ)
noise = Noise(os.environ)
measured = Measured(os.environ)
