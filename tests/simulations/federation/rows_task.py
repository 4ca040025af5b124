"""A task whose model grows: each site appends rows that name it, its round and what it has seen of the model."""

import numpy as np

from atoll import Trained

SITES = ("a", "b", "c", "d")


class Rows:
    sites = SITES

    def initial(self, seed):
        return {"who": np.zeros(0, np.uint8), "what": np.zeros((0, 2), np.float32)}

    def train(self, parameters, instructions):
        count = int(instructions.local.get("rows", 1)) * (SITES.index(instructions.site) + 1)
        seen = len(parameters["who"])
        update = {
            "who": np.full(count, SITES.index(instructions.site), np.uint8),
            "what": np.tile(np.array([instructions.round_id, seen], np.float32), (count, 1)),
        }
        return Trained(update, num_examples=10 * count + 1)

    def evaluate(self, parameters, *, split, site):
        return {"loss": (float(len(parameters["who"])), 1.0)}


class Scalar(Rows):
    def initial(self, seed):
        return {**super().initial(seed), "bias": np.zeros((), np.float32)}


class Wide(Rows):
    def train(self, parameters, instructions):
        return Trained({"who": np.zeros(1, np.uint8), "what": np.zeros((1, 3), np.float32)}, 1)


class Half(Rows):
    def train(self, parameters, instructions):
        return Trained({"who": np.zeros(1, np.uint8)}, 1)


task, scalar, wide, half = Rows(), Scalar(), Wide(), Half()
