"""A task whose manifest is nearly as long as a message may be: three thousand tensors with the longest of names."""

import numpy as np

from atoll.task.array_task import Trained

NAMES = [f"{index:04d}." + "n" * 1000 for index in range(3000)]


class Names:
    sites = ("a",)

    def initial(self, seed):
        return {name: np.zeros((), np.float32) for name in NAMES}

    def train(self, parameters, instructions):
        return Trained({name: np.ones((), np.float32) for name in NAMES}, 1)


task = Names()
