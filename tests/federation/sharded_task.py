"""A model that is cut over four ranks, and updates of which site and round decide every bit. Without torch."""

import numpy as np

from atoll.task.array_task import Trained

SIZES = {"u": 7 << 17, "v": 7 << 17, "w": 9 << 17}
"""Elements of float32. "w" is larger than a piece of 4 MiB, and so each of four ranks owns some of the 11.5 MiB."""


class Noise:
    sites = ("a", "b", "c")

    def initial(self, seed):
        return {**noise(seed), "steps": np.zeros((), np.int64)}

    def train(self, parameters, instructions):
        new = noise(instructions.seed)
        update = {name: values - np.float32(0.1) * parameters[name] for name, values in new.items()}
        return Trained({**update, "steps": np.ones((), np.int64)}, 1 + instructions.seed % 1000)

    def evaluate(self, parameters, *, split, site):
        some = parameters["w"][::1024]
        return {"mean": (float(np.sum(some, dtype=np.float64)), float(some.size))}


def noise(seed):
    generator = np.random.default_rng(seed)
    return {name: generator.random(size, np.float32) for name, size in SIZES.items()}


task = Noise()
