"""A run that a coordinator hosts: of rounds, or of messages."""

from atoll.server.hosting.control_streams import Connection
from atoll.server.hosting.message_driver import MessageDriver
from atoll.server.hosting.run_driver import RunDriver

HostedRun = RunDriver | MessageDriver


def may_join(connection: Connection, run: HostedRun) -> bool:
    """Return whether a connected client takes part in a run: its agent has the task, and supports the run's kind."""
    return run.task in connection.tasks and (isinstance(run, RunDriver) or connection.takes_messages)
