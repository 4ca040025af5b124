"""The crew of each task, the ranks of a mesh that work for one client, by the settings of `[crew]`."""

import dataclasses
import logging
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atoll.client.crew_config import CrewConfig
from atoll.client.disk.state_directory import StateDirectory
from atoll.ground.noise.key import key_of
from atoll.ground.printable import count_of
from atoll.ground.process.log_streams import open_log
from atoll.parallel.launch.launcher import Launcher, elastic
from atoll.parallel.launch.spec import Spec
from atoll.parallel.mesh_client.supervisor.crew import Crew, CrewTerms, Ranks
from atoll.parallel.mesh_client.supervisor.interval import Interval
from atoll.parallel.mesh_client.supervisor.terms import Terms

logger = logging.getLogger(__name__)

ENTRY = "atoll.parallel.mesh_client.main:main"
"""Entry function of each rank that the agent starts."""

PRELOAD = ("atoll.parallel.mesh_client.main", "atoll.parallel.mesh_client.bench")
"""Modules that the fork server imports for the entry function."""

RESTARTS_MAX = 10**6
"""Restarts of one launcher, whose ranks live for many rounds; restarts within a job are counted separately."""


class Elsewhere:
    """Ranks that another system has started; they exit when the connection closes."""

    pid: int | None = None
    exit_code: int | None = None

    def kill(self) -> None:
        """Do nothing: the launcher of the ranks restarts them when rank 0 has lost its connection."""


def crews_of(
    tasks: Mapping[str, str],
    config: CrewConfig,
    *,
    site: str,
    state: StateDirectory,
    device: str,
    settings: Mapping[str, Any] | None = None,
    load_timeout: float,
    entry: str = ENTRY,
) -> dict[str, Crew]:
    """Return the ranks (a crew) of each task, by the task's name.

    Args:
        tasks: references of the tasks, by name.
        config: the settings of the crew, the table `[crew]`.
        site: name of the site whose data the tasks load.
        state: the agent's state directory.
        device: "auto", "cpu" or "cuda".
        settings: the site's own settings for its tasks.
        load_timeout: seconds in which the ranks must have started and loaded the task.
        entry: the function of a rank.
    """
    return {
        name: _crew(
            reference,
            terms_of(config, config.folder or state.crew, state.worker_log(name), device, load_timeout),
            config,
            site=site,
            settings=settings,
            entry=entry,
            noise=key_of(state.noise_secret, "task", name, site),
        )
        for name, reference in tasks.items()
    }


def terms_of(config: CrewConfig, folder: Path, log: Path, device: str, load_timeout: float) -> CrewTerms:
    """Return the settings of a crew: everything that its ranks are started with.

    Args:
        config: its settings.
        folder: the folder of the agent and all ranks.
        log: the log of the task's code at this agent; ranks of another launcher log into the shared folder.
        device: "auto", "cpu" or "cuda".
        load_timeout: seconds in which the ranks must have started and loaded the task.
    """
    plan = {"mesh": config.mesh, **config.plan} if config.is_auto else dataclasses.asdict(config.parallel)
    name = log.name.removesuffix(".log")
    place = log.parent if config.launch == "local" else folder
    return CrewTerms(
        folder=folder,
        ranks=Terms(device=device, collective_timeout=config.collective_timeout, log=str((place / name).absolute())),
        plan=plan,
        num_ranks=config.num_ranks,
        listen=config.listen or ("" if config.launch == "local" else ":0"),
        max_restarts=config.max_restarts,
        checkpoint_every=Interval.parse(config.checkpoint_every),
        load_timeout_s=load_timeout,
    )


def _crew(
    task: str,
    terms: CrewTerms,
    config: CrewConfig,
    *,
    site: str,
    settings: Mapping[str, Any] | None,
    entry: str,
    noise: bytes,
) -> Crew:
    log = Path(f"{terms.ranks.log}.log")

    def start(on_end: Callable[[int], None]) -> Ranks:
        if config.launch == "external":
            logger.info("waiting for another launcher's %s in %s", count_of(config.num_ranks, "rank"), terms.folder)
            return Elsewhere()
        command, environment = command_of(config, terms, entry)
        with open_log(log) as output:
            return Launcher(command, environment, log=output, on_end=on_end)

    return Crew(task, terms, start, site=site, settings=settings, noise=noise)


def command_of(config: CrewConfig, terms: CrewTerms, entry: str = ENTRY) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts all ranks, and its additional environment variables."""
    folder = str(terms.folder.absolute())
    if config.launch == "local":
        spec = Spec(
            entry=entry,
            args=(folder,),
            nproc=config.num_here,
            max_restarts=RESTARTS_MAX,
            folder=folder,
            preload=PRELOAD,
            is_bound=True,
        )
        return elastic(spec)
    values = {
        "nproc": config.num_here,
        "nodes": config.nodes,
        "num_ranks": config.num_ranks,
        "folder": folder,
        "rendezvous": f"{socket.gethostname()}:{_free_port()}",
        "python": sys.executable,
    }
    # otherwise torchrun on several machines makes its ranks meet where the last failure of a machine left them
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [argument.format(**values) for argument in config.command], environment


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port
