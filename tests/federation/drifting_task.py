"""A task without torch whose update differs from round to round and site to site, and is the same when repeated."""

import numpy as np

from atoll import Trained

SITES = ("a", "b")


class Drifting:
    sites = SITES

    def initial(self, seed):
        return {"w": np.zeros(20_000, np.float32)}

    def num_examples(self, site):
        return 10

    def train(self, parameters, instructions):
        rng = np.random.default_rng(instructions.seed)
        return Trained({"w": rng.standard_normal(20_000).astype(np.float32)}, 10)


task = Drifting()
