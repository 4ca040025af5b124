"""A task whose sites misbehave as their names say. No torch, so that workers start fast."""

import ctypes
import os
import time

import numpy as np

from atoll.task.array_task import Trained

NUM_ELEMENTS = int(os.environ.get("TROUBLE_ELEMENTS", "50000"))
SITES = ("a", "b", "c", "crash", "hang", "raise", "nan", "slow")


class Trouble:
    """Every site adds one to each number."""

    sites = SITES

    def initial(self, seed):
        return {"w": np.zeros(NUM_ELEMENTS, np.float32)}

    def num_examples(self, site):
        return 10

    def train(self, parameters, instructions):
        match instructions.site:
            case "crash":
                ctypes.string_at(0)
            case "hang":
                time.sleep(3600)
            case "raise":
                raise RuntimeError("the scanner is broken")
            case "nan":
                return Trained({"w": np.full(NUM_ELEMENTS, np.nan, np.float32)}, 10)
            case "slow":
                steps = 0
                while not instructions.deadline.passed() and steps < 200:
                    time.sleep(0.05)
                    steps += 1
                return Trained({"w": np.ones(NUM_ELEMENTS, np.float32)}, 10, {}, max(steps, 1) / 200)
        time.sleep(float(os.environ.get("TROUBLE_SLEEP", "0")))
        return Trained({"w": np.ones(NUM_ELEMENTS, np.float32)}, 10, {"loss": (5.0, 10.0)})

    def evaluate(self, parameters, *, split, site):
        count = 100 if site is None else 10 * (1 + SITES.index(site))
        return {"mean": (float(parameters["w"][0]) * count, count)}


task = Trouble()
