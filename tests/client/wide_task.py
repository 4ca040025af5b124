"""A task without torch whose update is as wide as the model, and the same at every training."""

import time

import numpy as np

from atoll import Trained


class Wide:
    def initial(self, seed):
        return {"w": np.zeros(8, np.float32)}

    def num_examples(self, site):
        return 3

    def train(self, parameters, instructions):
        time.sleep(instructions.local.get("sleep", 0))
        return Trained({"w": np.random.default_rng(1).standard_normal(parameters["w"].shape, np.float32)}, 3)


task = Wide()
