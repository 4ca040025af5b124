"""A model that is cut over four ranks, and updates of which site and round decide every bit. Without torch."""

import os
import time

import numpy as np

NUM_ELEMENTS = 1 << 22
"""16 MiB of float32: four pieces of 4 MiB, so that each of four ranks owns one."""


class Noise:
    sites = ("a", "b", "c", "slow")

    def initial(self, seed):
        return {**noise(seed), "steps": np.zeros((), np.int64)}

    def train(self, parameters, instructions):
        from atoll.parallel.array_task import Trained

        if instructions.site == "slow":
            time.sleep(float(os.environ.get("NOISE_SLEEP", "0")))
        new = noise(instructions.seed)
        update = {name: values - np.float32(0.1) * parameters[name] for name, values in new.items()}
        return Trained({**update, "steps": np.ones((), np.int64)}, 1 + instructions.seed % 1000)

    def evaluate(self, parameters, *, split, site):
        return {"mean": (float(np.sum(parameters["w"][::1024], dtype=np.float64)), float(NUM_ELEMENTS // 1024))}


def noise(seed):
    generator = np.random.default_rng(seed)
    return {"w": generator.standard_normal(NUM_ELEMENTS, np.float32), "bias": generator.random(7, np.float32)}


task = Noise()
