"""The process of an agent: it enrols, opens the state directory, starts the workers and runs one `Agent`."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from atoll.client.agent import Agent
from atoll.client.config import AgentConfig
from atoll.client.disk.seen_store import Memory
from atoll.client.disk.state_directory import StateDirectory
from atoll.client.disk.verifier import Verifier
from atoll.client.policy.gate import Gate
from atoll.client.site.security import SiteSecurity
from atoll.client.work.crew import crews_of
from atoll.client.work.runner import Runner
from atoll.client.work.worker import WorkerRunner, workers_of
from atoll.ground.noise.key import key_of
from atoll.ground.process.core_dumps import leave_memory_out_of_core_dumps
from atoll.parallel.mesh_client.supervisor.crew import Crew
from atoll.protocol import service_manager
from atoll.protocol.identity.membership import Membership, unless_stopped
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.identity.proxy import through_proxy
from atoll.protocol.notices.life import Life
from atoll.protocol.settings import ConfigError
from atoll.protocol.signals import call_at_end
from atoll.task.apps import is_app
from atoll.task.task import TaskNotFound, task_name
from atoll.training.worker.process import Environment, Worker


async def run_agent(
    config: AgentConfig,
    tasks: Mapping[str, str],
    *,
    runner: Runner | None = None,
    handle_signals: bool = True,
    authorities: Callable[[], bytes] | None = None,
    on_ready: Callable[[Agent], None] = lambda agent: None,
) -> int:
    """Run one agent until a signal ends it, or until it is done; returns the exit code of its process.

    Args:
        config: the agent's settings.
        tasks: references of the tasks that it allows, by the names that coordinators use (`tasks_by_name`).
        runner: trains and evaluates; None: a worker process for each task.
        handle_signals: shut down cleanly at the signals that end a process; in the main thread only.
        authorities: returns the certificates of the trusted authorities, PEM, for each new connection. None: the
            certificates of the membership; without a membership the agent is `--insecure` and verifies nothing.
        on_ready: called with the agent before it dials.

    Raises:
        ConfigError: the state directory is in use, the policy is not valid, the environment names a proxy that cannot
            be used, or a task does not load. The exit code is then 2.
    """
    leave_memory_out_of_core_dumps()
    state = StateDirectory(config.state)
    life = Life(state.path)
    gate = let_go = None
    try:
        taking = Membership.take(
            state.identity,
            Identity(Role.CLIENT, config.site),
            join=config.join,
            coordinator=config.coordinator,
            insecure=config.insecure,
        )
        if (membership := await (unless_stopped(taking) if handle_signals else taking)) is None:
            return 0
        noise = key_of(state.noise_secret, "name of the secret").hex()[:32]
        gate = Gate(config.policy, state.path, coordinator=membership.address, noise=noise)
        security = SiteSecurity(config.site, state.path, gate, membership.keeper)
        if runner is None:
            workers = _workers(config, tasks, state)
            runner = WorkerRunner(
                tasks, workers, state=state, lease=config.lease, settings=config.task, reread=config.reread
            )
        membership = replace(membership, dialer=through_proxy(membership.dialer, os.environ))
        if authorities is None and (keeper := membership.keeper) is not None:
            authorities = lambda: keeper.current.ca_pem  # noqa: E731
        verifier = Verifier(config.site, authorities, Memory(state.seen)) if authorities is not None else None
        agent = Agent(config, tasks, runner, state, gate, membership, verifier, security=security)
        life.tell(agent.recovered)
        if handle_signals:
            let_go = call_at_end(agent.stop, "stopped by %s: the agent ends, and finished updates wait in its spool")
        on_ready(agent)
        service_manager.tell(service_manager.READY, f"{config.site}, dialling {membership.address}")
        return await agent.run()
    finally:
        if let_go is not None:
            let_go()
        if gate is not None:
            gate.close()
        life.close()
        state.close()


def _workers(config: AgentConfig, tasks: Mapping[str, str], state: StateDirectory) -> Mapping[str, Worker | Crew]:
    """Return the worker of each task: the ranks of a mesh if one is set, else one process.

    Raises:
        ConfigError: a mesh is set for a task that trains with custom code.
    """
    given: dict[str, Any] = {"site": config.site, "state": state, "settings": config.task, "device": config.device}
    if config.crew.mesh:
        if apps := [reference for reference in tasks.values() if is_app(reference)]:
            why = "a Flower app trains with its own code, not on a mesh: leave the mesh out"
            raise ConfigError([f"crew.mesh: {config.crew.mesh!r} for {', '.join(apps)}: {why}"])
        return crews_of(tasks, config.crew, load_timeout=config.load_timeout, **given)
    environment = Environment(config.python, load_timeout_s=config.load_timeout)
    return workers_of(tasks, threads=config.threads or None, environment=environment, **given)


def tasks_by_name(references: Iterable[str]) -> dict[str, str]:
    """Return the references by their task names, which a coordinator's invitations use.

    Raises:
        ConfigError: a reference is not valid, or two have the same name.
    """
    tasks: dict[str, str] = {}
    for reference in references:
        try:
            name = task_name(reference)
        except TaskNotFound as error:
            raise ConfigError([str(error)]) from error
        if tasks.setdefault(name, reference) != reference:
            raise ConfigError([f"{tasks[name]} and {reference} have one name, {name}: rename one of the files"])
    return tasks
