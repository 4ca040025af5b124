"""A task that a mesh cannot train: a layer stays at the site, and its own hooks need whole tensors."""

from dataclasses import replace

from atoll import Algorithm
from tests.federation.crew import exact_task

task = replace(exact_task.task, algorithm=Algorithm(), local=replace(exact_task.task.local, keep="w"))
