"""The coordinator as a process: state directory, server, signals, exit code."""

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.ground.process.core_dumps import leave_memory_out_of_core_dumps
from atoll.protocol.notices.life import Life
from atoll.protocol.notices.settings import NotifyConfig
from atoll.protocol.settings import ConfigError
from atoll.protocol.signals import ExitCode, call_at_end
from atoll.protocol.vocabulary import TERMINAL, RunId, RunState
from atoll.protocol.wire.allocator import keep_freed_memory, share_heaps
from atoll.server.config.process import CoordinatorConfig
from atoll.server.config.run import RunConfig
from atoll.server.config.run_changes import differing_keys
from atoll.server.errors import OperatorError
from atoll.server.files.disk_limits import check_free_min
from atoll.server.hosting.clock_watch import check_clock
from atoll.server.hosting.coordinator import Coordinator
from atoll.server.hosting.notices import CoordinatorWatch
from atoll.server.identity.setup import Gate, equip_rank, gate_of, publisher
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.ports import Ports
from atoll.server.process_tuning import allow_open_files, collect_regularly, collect_seldom
from atoll.server.ranks.local_ranks import SpawnedRanks

logger = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""Seconds for clients to learn of the end of the runs and to leave, before the server closes."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Faults that the operator accepts for one start."""

    clock: bool = False
    """Whether the machine's clock may disagree with the journal's last true time."""
    losses: bool = False
    """Whether files on which the journal relies may be missing or damaged."""
    published: Mapping[str, int] = field(default_factory=dict)
    """The newest published rounds of private runs before a restoration, as for `restoration.published_of`."""


async def host(
    config: CoordinatorConfig,
    run: RunConfig | None = None,
    *,
    again: bool = False,
    stay: bool = False,
    accepts: Accepted = Accepted(),
    notify: NotifyConfig = NotifyConfig(),  # noqa: B008 - frozen
    on_ready: Callable[[Coordinator, Ports], None] = lambda coordinator, ports: None,
    on_end: Callable[[], None] = lambda: None,
) -> int:
    """Host runs until a signal arrives or, unless `stay`, until every run has ended and the clients have been told.

    Runs that an earlier process left open continue. `run` starts a new run unless one of the same name is open, or the
    last one of that name had the same settings and `again` is not set: a supervisor that restarts this process after
    the end of a run does not train a second time.

    Args:
        config: the settings of the process.
        run: a run to start or to continue; None: only the runs in the state directory.
        again: start a new run although the last one of this name had the same settings.
        stay: keep serving after the last run has ended.
        notify: how the operator is notified, and the thresholds.
        accepts: the faults that the operator accepts for this start.
        on_ready: called once the ports answer.
        on_end: called when the shutdown begins.

    Returns:
        The exit code: 0; 1 when a run failed or was stopped, in this process or (`run`) in an earlier one; 70 after an
        internal error, from which a restart recovers by replaying the journal.

    Raises:
        OperatorError, ConfigError: the operator's mistakes.
        OSError: the disk or the database refuses.
    """
    leave_memory_out_of_core_dumps()
    allow_open_files()
    share_heaps()
    keep_freed_memory()
    collect_seldom()
    collect_regularly()
    check_free_min(config.state, config.disk_free_min)
    is_new = not config.database and not config.state.exists()  # a database refers to its directory: never remove it
    with (
        StateDirectory.open(config.state, database=config.database) as state,
        _gone_if_refused(state.path, may_go=is_new) as stays,
        closing(Life(state.path)) as life,
    ):
        accepted = check_clock(state, accept=accepts.clock)  # certificates are made with this clock
        async with gate_of(config, state) as gate:
            coordinator = Coordinator(config, state, gate.dialer, gate.is_revoked)
            coordinator.signer = publisher(gate, state)
            if gate.members is not None:
                enrolments = gate.members.enrolments
                coordinator.authorities = lambda: enrolments.ca_pem
            coordinator.clocks.accepted(accepted)
            coordinator.notices = _watch(coordinator, gate, notify).notices
            ports = await Ports.open(coordinator, gate)
            stop, ranks = asyncio.Event(), None
            call_at_end(stop.set, "stopped by %s: the coordinator ends")
            try:
                begun = _start(coordinator, ports, gate, run, again=again, accepts=accepts, on_open=stays)
                starting = asyncio.ensure_future(begun)
                if await _is_stopped(stop, starting):
                    return ExitCode.OK
                asked, ranks = starting.result()
                life.tell(coordinator.recovered)
                state.announce(ports.address, ports.admin_address, os.getpid(), insecure=config.insecure)
                on_ready(coordinator, ports)
                return await _until_over(coordinator, stop, asked, stay=stay)
            finally:
                on_end()
                await ports.stop()
                if ranks is not None:
                    await ranks.stop()
                await coordinator.stop()


def _watch(coordinator: Coordinator, gate: Gate, notify: NotifyConfig) -> CoordinatorWatch:
    if gate.members is None:
        return CoordinatorWatch(coordinator, notify, None)
    enrolments = gate.members.enrolments
    return CoordinatorWatch(coordinator, notify, enrolments.members, lambda: enrolments.ca_pem)


async def _start(
    coordinator: Coordinator,
    ports: Ports,
    gate: Gate,
    run: RunConfig | None,
    *,
    again: bool,
    accepts: Accepted,
    on_open: Callable[[], None],
) -> tuple[RunId | None, SpawnedRanks | None]:
    """Load all runs and their tasks, open the ports, and start the aggregation ranks that the settings ask for.

    Returns:
        The id of `run`, and the ranks, if any.
    """
    config = coordinator.config
    await coordinator.start(accept_losses=accepts.losses, published=accepts.published)
    asked = await _find_or_add(coordinator, run, again=again) if run is not None else None
    await ports.start()  # after the run was added: a client that joins learns of its task
    on_open()
    if coordinator.ranks is None or not config.start_aggregators:
        return asked, None
    for rank in range(config.aggregators):
        await equip_rank(gate, config, rank)  # a fault ends the start
    ranks = SpawnedRanks(
        config.aggregators,
        config.state,
        ports.address,
        max_connections=config.max_connections,
        insecure=config.insecure,
        equip=lambda rank: equip_rank(gate, config, rank),
    )
    ranks.start()
    return asked, ranks


async def _is_stopped(stop: asyncio.Event, starting: "asyncio.Future[Any]") -> bool:
    """Wait until the coordinator has started, or until a signal arrives, which cancels the start.

    Raises:
        OperatorError, ConfigError, OSError: the coordinator cannot start.
    """
    waiting = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({waiting, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            return False
        return True
    finally:
        waiting.cancel()
        starting.cancel()
        await asyncio.wait({starting})


@contextmanager
def _gone_if_refused(state: Path, *, may_go: bool) -> Iterator[Callable[[], None]]:
    """Remove a new, locked state directory if the operator's mistake leaves nothing to host in it.

    Args:
        state: the directory.
        may_go: whether this process has just created it.

    Yields:
        A function that keeps the directory from then on.
    """

    def stays() -> None:
        nonlocal may_go
        may_go = False

    try:
        yield stays
    except (OperatorError, ConfigError):
        if may_go:
            shutil.rmtree(state, ignore_errors=True)
        raise


async def _find_or_add(coordinator: Coordinator, config: RunConfig, *, again: bool) -> RunId:
    """Return the id of the requested run: an open one, an already ended one, or a new one."""
    namesakes = [run for run in coordinator.runs.values() if run.config.name == config.name]
    for run in namesakes:
        if coordinator.state_of(run.run_id) not in TERMINAL:
            if not await coordinator.has_settings(run.run_id, config):
                keys = ", ".join(differing_keys(run.config, config))
                text = "run %s continues with the settings that it was started with, others are given now for %s: "
                text += "pause it, and `atoll run resume %s --set KEY=VALUE` changes them"
                logger.warning(text, run.run_id, keys, run.run_id, extra={"run": run.run_id})
            return run.run_id
    if namesakes and not again and await coordinator.has_settings(namesakes[-1].run_id, config):
        ended = namesakes[-1].machine.ledger
        run_id = namesakes[-1].run_id
        has_all = ended.state is RunState.FINISHED and not ended.early_stop
        more = f" --rounds {ended.version + 1}" if has_all else ""
        reopen = f"--stay and `atoll run resume {run_id}{more}` continue it, "
        what = (run_id, ended.state, ended.cause, reopen)
        text = "run %s with these settings is %s already (%s): %s--again starts a new one"
        logger.warning(text, *what, extra={"run": run_id})
        return run_id
    run_id = await coordinator.add_run(config)
    if told := coordinator.namesake_of(run_id):
        logger.warning("run %s is new: %s", run_id, told, extra={"run": run_id})
    return run_id


async def _until_over(coordinator: Coordinator, stop: asyncio.Event, asked: RunId | None, *, stay: bool) -> int:
    while (code := await _ended_from_outside(coordinator, stop, stay=stay)) is None:
        await _farewell(coordinator)
        if not _has_work(coordinator):  # the operators' port answers meanwhile: a run may be started, or resumed
            return _code_of_runs(coordinator, asked)
    return code


async def _ended_from_outside(coordinator: Coordinator, stop: asyncio.Event, *, stay: bool) -> int | None:
    """Wait for an internal error, a signal or, unless `stay`, the end of every run.

    Returns:
        The exit code; None if every run has ended.
    """
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wait()), asyncio.shield(coordinator.crashed)]
    if not stay:
        waits.append(asyncio.ensure_future(_all_ended(coordinator)))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if coordinator.crashed.done():
        return ExitCode.BUG
    return ExitCode.OK if stop.is_set() else None


def _code_of_runs(coordinator: Coordinator, asked: RunId | None) -> int:
    concerned = [run_id for run_id, run in coordinator.runs.items() if run.ended.is_set() or run_id == asked]
    states = {coordinator.state_of(run_id) for run_id in concerned}
    return ExitCode.FAILED if states & {RunState.FAILED, RunState.STOPPED} else ExitCode.OK


async def _all_ended(coordinator: Coordinator) -> None:
    while _has_work(coordinator):
        await coordinator.added()
        if (run := _next_open(coordinator)) is not None:
            await coordinator.runs[run].ended.wait()
            await asyncio.sleep(0)


def _has_work(coordinator: Coordinator) -> bool:
    return coordinator.is_adding or _next_open(coordinator) is not None


def _next_open(coordinator: Coordinator) -> RunId | None:
    return next((run_id for run_id in coordinator.runs if coordinator.state_of(run_id) not in TERMINAL), None)


async def _farewell(coordinator: Coordinator) -> None:
    """Wait, at most `FAREWELL_S`, until the clients have learnt of the end and have left."""
    with suppress(TimeoutError):
        await asyncio.wait_for(coordinator.attendance.hub.empty(), FAREWELL_S)
