"""A task that loads."""

from tests.training.tasks import make_task

task = make_task()
