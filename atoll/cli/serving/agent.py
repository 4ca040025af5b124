"""`atoll agent`: train on the data of one owner, whenever a coordinator asks."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.printing import note, say

if TYPE_CHECKING:
    from atoll.client.config import AgentConfig

Tasks = Annotated[
    list[str],
    typer.Argument(
        metavar="TASK...",
        help="The tasks that this agent allows, `module:attribute` or `path/to/file.py:attribute`; it refuses others.",
    ),
]
Site = Annotated[str | None, typer.Option("--site", metavar="NAME", help="The data owner; short for site.")]
Join = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="CODE",
        help="The join code, needed once: `atoll client invite NAME` prints it; - reads it from standard input.",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option("--coordinator", metavar="HOST:PORT", help="Where it is, if not where it said at enrolment."),
]
State = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="The agent's own directory; by default atoll-agent-NAME."),
]
Policy = Annotated[
    Path | None, typer.Option("--policy", metavar="FILE", help="The site's own policy; short for policy.")
]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="The agent's TOML.")]


def agent(
    tasks: Tasks,
    site: Site = None,
    join: Join = None,
    coordinator: Coordinator = None,
    insecure: options.Insecure = None,
    state: State = None,
    policy: Policy = None,
    config: Config = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    check: options.Check = False,
) -> None:
    """Take part: train on this site's data when invited, and send the update. Needs outbound connections only.

    It survives a lost connection, a restart of either side, and a crash of the training: what is finished lies in its
    spool until the coordinator has answered for it.
    """
    from atoll.cli.files import overriding

    place = {"join": options.read_join_code(join), "coordinator": coordinator, "insecure": insecure}
    settings, named = _checked(config, overriding(overrides, site=site, state=state, policy=policy, **place), tasks)
    if check:
        _print_effective(settings, tasks)
        return
    from atoll.cli import log
    from atoll.client.process import run_agent
    from atoll.protocol.wire.allocator import keep_freed_memory

    log.configure(settings.site)
    keep_freed_memory()
    note(f"atoll agent {settings.site}, for {', '.join(named)}, state in {settings.state}")
    raise typer.Exit(asyncio.run(run_agent(settings, named)))


def _checked(
    path: Path | None, overrides: Sequence[str], references: Sequence[str]
) -> "tuple[AgentConfig, Mapping[str, str]]":
    """The settings and the tasks by name.

    Raises:
        ConfigError: with everything that is wrong with either.
    """
    from atoll.cli.files import missing_file
    from atoll.client.config import AgentConfig
    from atoll.client.process import tasks_by_name
    from atoll.protocol.settings import ConfigError, load

    faults = [fault for reference in references if (fault := missing_file(reference)) is not None]
    settings, named = None, {}
    try:
        settings = load(AgentConfig, path, overrides)
    except ConfigError as error:
        faults += error.faults
    if settings is not None:
        faults += _faults_of_policy(settings.policy)
    try:
        named = tasks_by_name(references)
    except ConfigError as error:
        faults += error.faults
    if faults or settings is None:
        raise ConfigError(faults)
    if "state" not in settings.model_fields_set:  # several agents in one folder are the rule while all is loopback
        settings = settings.model_copy(update={"state": Path(f"atoll-agent-{settings.site}")})
    return settings, named


def _faults_of_policy(path: Path | None) -> Sequence[str]:
    from atoll.client.policy.file import PolicyFile
    from atoll.protocol.settings import ConfigError

    try:
        PolicyFile(path)
    except ConfigError as error:
        return error.faults
    return ()


def _print_effective(settings: "AgentConfig", references: Sequence[str]) -> None:
    from atoll.cli.files import load_user_task
    from atoll.protocol.settings import effective

    for reference in references:
        load_user_task(reference)
    say(effective(settings).rstrip("\n"))
