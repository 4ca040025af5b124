"""A task that a mesh cannot train: all of its layers stay at the site, and its own loss needs whole batches."""

from dataclasses import replace

from atoll import Algorithm
from tests.federation.crew import exact_task


class Doubled(Algorithm):
    def loss(self, client, loss, outputs):
        return 2 * loss


task = replace(exact_task.task, algorithm=Doubled(), local=replace(exact_task.task.local, keep="w"))
