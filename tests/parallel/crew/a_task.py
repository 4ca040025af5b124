"""A task that loads."""

from tests.parallel.tasks import make_task

task = make_task()
