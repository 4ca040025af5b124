"""A run that a coordinator hosts: of rounds, or of messages; and the making of the drivers of the second kind."""

from atoll.aggregation.noise.key import key_of
from atoll.aggregation.printable import count_of
from atoll.protocol.identity.noise_secret import noise_secret, run_number
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import RunId
from atoll.server.config.process import CoordinatorConfig
from atoll.server.config.run import RunConfig
from atoll.server.errors import OperatorError
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.files.disk_limits import DiskLimits
from atoll.server.files.run_store import RunStore
from atoll.server.hosting.control_streams import Connection
from atoll.server.hosting.message_driver import MessageDriver
from atoll.server.hosting.run_driver import RunDriver
from atoll.server.hosting.run_parts import SharedParts
from atoll.server.journal.journal import RunRow
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.programs.contents import Contents

HostedRun = RunDriver | MessageDriver


def may_join(connection: Connection, run: HostedRun) -> bool:
    """Return whether the client of a connection takes part in a run: its agent has the task, and knows messages."""
    return run.task in connection.tasks and (isinstance(run, RunDriver) or connection.takes_messages)


class MessageRuns:
    """Makes the drivers of runs of messages; none is started.

    Args:
        config: the coordinator's settings.
        state: the state directory, locked.
        shared: the parts that all runs share.
    """

    def __init__(self, config: CoordinatorConfig, state: StateDirectory, shared: SharedParts) -> None:
        self._config, self._state, self._shared = config, state, shared

    def check(self) -> None:
        """Check that this coordinator can host a run of messages.

        Raises:
            OperatorError: replies would go to aggregation ranks, which fold and do not answer.
        """
        if self._config.aggregators:
            ranks = count_of(self._config.aggregators, "aggregation rank")
            what = f"program.main: this coordinator has {ranks}, for updates alone"
            raise OperatorError(f"{what}; allowed: a coordinator without --aggregators")

    async def added(self, config: RunConfig, run_id: RunId) -> MessageDriver:
        """Add a run to the journal, and return its driver.

        Raises:
            OperatorError: this coordinator cannot host it.
            OSError: its folders cannot be made, or the journal cannot be written.
        """
        self.check()
        run = self.driver(config, run_id, ExchangeMachine(config.exchange_rules), 0)
        row = RunRow.new(run_id, config, config.rules, self._shared.clock.now())
        await on_thread(self._shared.journal_thread, self._shared.journal.add_run, row)
        return run

    def driver(self, config: RunConfig, run_id: RunId, machine: ExchangeMachine, seq: int) -> MessageDriver:
        """Make the driver of a run.

        Args:
            config: its settings.
            run_id: the run.
            machine: its machine, new or replayed.
            seq: the number of the last event that the machine has received.
        """
        folder, limits = self._state.run(run_id), DiskLimits(self._config.disk_free_min, self._config.incoming_max)
        store = RunStore(folder, disk=limits, has_files_only=True)
        noise = key_of(noise_secret(self._state.path), "run", run_id)
        contents = Contents(folder, store)
        number = run_number(self._state.path, run_id)
        return MessageDriver(run_id, config, machine, seq, contents, self._shared, noise, number)
