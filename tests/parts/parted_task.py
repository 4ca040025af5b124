"""A model of tensors that divide badly, and updates of which site and round decide every bit. Without torch."""

import numpy as np

from atoll.task.array_task import Trained

SHAPES = {"w": (300, 257), "v": (3, 5, 700), "b": (513,), "one": (1,)}


class Noise:
    sites = ("a", "b", "c")

    def initial(self, seed):
        return {**noise(seed), "steps": np.zeros((), np.int64)}

    def train(self, parameters, instructions):
        new = noise(instructions.seed)
        update = {name: values - np.float32(0.1) * parameters[name] for name, values in new.items()}
        return Trained({**update, "steps": np.ones((), np.int64)}, 1 + instructions.seed % 1000)

    def evaluate(self, parameters, *, split, site):
        return {"mean": (float(np.sum(parameters["w"], dtype=np.float64)), 1.0)}


def noise(seed):
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


task = Noise()
