"""The resumption of a run: whether it can continue, with which settings, and how an ended one would."""

from collections.abc import Iterable, Sequence

from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import TERMINAL, RunState
from atoll.server.config.run import RunConfig
from atoll.server.config.run_changes import as_overrides, changed, may_go_on
from atoll.server.errors import OperatorError
from atoll.server.hosting.hosted_run import HostedRun
from atoll.server.hosting.message_driver import MessageDriver
from atoll.server.hosting.run_driver import RunDriver


def resumed_config(run: RunDriver, overrides: Sequence[str]) -> RunConfig | None:
    """Return the changed settings with which a run would resume; None: no change.

    Raises:
        OperatorError: the run cannot be resumed now, or not with these settings.
    """
    check_resumable(run, has_changes=bool(overrides))
    if not overrides:
        return None
    try:
        return changed(run.config, overrides, version=run.machine.ledger.version)
    except ConfigError as error:
        raise OperatorError(str(error)) from error


def check_resumable(run: RunDriver, *, has_changes: bool) -> None:
    """Check that a run of rounds can be resumed now; raises OperatorError."""
    ledger, run_id = run.machine.ledger, run.run_id
    if ledger.state is RunState.FINISHED and not has_changes and not ledger.early_stop:
        more = f"`atoll run resume {run_id} --rounds {ledger.version + 1}` (or more) gives it further rounds"
        raise OperatorError(f"run {run_id} is finished: {ledger.cause}; {more}")
    if ledger.pause_reason is not None and has_changes:
        raise OperatorError(f"run {run_id} is still in a round: change its settings when it is paused")
    if ledger.state in (RunState.RUNNING, RunState.QUEUED) and ledger.pause_reason is None:
        raise OperatorError(f"run {run_id} is {ledger.state}; only a paused or an ended one can be resumed")


def check_repeatable(run: MessageDriver, overrides: Sequence[str]) -> None:
    """Check that a run of messages can continue; raises OperatorError."""
    state = run.machine.ledger.state
    if overrides:
        raise OperatorError(f"run {run.run_id} is one of messages: its settings are fixed, as its program is repeated")
    if state not in (RunState.STOPPED, RunState.FAILED, RunState.PAUSED) and not run.machine.ledger.pausing:
        raise OperatorError(f"run {run.run_id} is {state}; only one that is paused, stopped or failed can be resumed")


def way_on(runs: Iterable[HostedRun], new: HostedRun) -> str:
    """Return how the last other run of its name could continue with the settings of a new one, or ""."""
    older = [run for run in runs if run is not new and run.config.name == new.config.name]
    last = older[-1] if older and older[-1].machine.ledger.state in TERMINAL else None
    if last is None or not may_go_on(last.config, new.config, version=last.machine.ledger.version):
        return ""
    return (
        f"it begins from version 0; run {last.run_id} is {last.machine.ledger.state} at version "
        f"{last.machine.ledger.version}, and `atoll run resume {last.run_id} {as_overrides(last.config, new.config)}` "
        "would continue from there"
    )
