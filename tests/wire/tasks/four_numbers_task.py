"""A task without torch: four numbers that every site pulls towards its own."""

import time

import numpy as np

from atoll.task.array_task import Trained

SITES = ("a", "b", "c", "d", "e")


class Tiny:
    """One step of gradient descent on |w - target|^2 / 2, so an update is known by hand."""

    sites = SITES

    def initial(self, seed):
        return {"w": np.full(4, float(seed % 7), np.float32), "count": np.zeros((), np.int64)}

    def num_examples(self, site):
        return 10 * (SITES.index(site) + 1)

    def train(self, parameters, instructions):
        time.sleep(float(instructions.local.get("sleep", 0.0)))
        target = np.full(4, SITES.index(instructions.site), np.float32)
        update = {"w": np.float32(0.5) * (target - parameters["w"]), "count": np.ones((), np.int64)}
        return Trained(update, self.num_examples(instructions.site), {"loss": (1.0, 1.0)})

    def evaluate(self, parameters, *, split, site):
        return {"mean": (float(parameters["w"].sum()), 4.0)}


task = Tiny()
