"""`atoll agent`: run a site's agent, which trains on the site's data when a coordinator invites it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.command import if_stopped
from atoll.cli.printing import note, say_settings
from atoll.task.apps import with_app

if TYPE_CHECKING:
    from atoll.client.config import AgentConfig

Tasks = Annotated[
    list[str],
    typer.Argument(
        metavar="TASK...",
        help="The tasks that this agent trains, `module:attribute`, `path/to/file.py:attribute` or the folder of a "
        "Flower app; it refuses others.",
    ),
]
Site = Annotated[
    str | None,
    typer.Option("--site", metavar="NAME", help="Name of the site, required here or as site in the settings."),
]
Join = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="CODE",
        help="The join code, at the first start; `atoll client invite NAME` prints it; - reads it from standard input, "
        "@FILE from a file.",
    ),
]
State = Annotated[
    Path | None,
    typer.Option(
        "--state", metavar="DIR", help="The agent's state directory; by default atoll-agent-NAME; short for state."
    ),
]
Policy = Annotated[
    Path | None,
    typer.Option(
        "--policy", metavar="FILE", help="TOML of the site's policy; by default every run is allowed; short for policy."
    ),
]
MeshText = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXES",
        help="Train on a mesh of ranks, as in dp_shard=4,tp=2 or auto, instead of in one process; short for crew.mesh.",
    ),
]
Nproc = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", help="Ranks of the mesh on this machine; short for crew.nproc."),
]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML of the agent's settings.")]


def agent(
    tasks: Tasks,
    site: Site = None,
    join: Join = None,
    coordinator: options.Coordinator = None,
    insecure: options.Insecure = None,
    state: State = None,
    policy: Policy = None,
    mesh: MeshText = None,
    nproc: Nproc = None,
    config: Config = None,
    metrics: options.Metrics = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    check: options.Check = False,
    json: options.CheckJson = False,
    log_form: options.Log = "text",
) -> None:
    """Run the agent of a site: train on its data when invited, and send the update. Needs outbound connections only.

    The agent survives a lost connection, a restart of either side, and a crash of the training. A finished update stays
    in its spool until the coordinator has answered it.
    """
    if_stopped("before it dialled")
    from atoll.operations.load import overriding

    options.json_only_with(check, json)
    tasks = [with_app(task) for task in tasks]
    place: dict[str, object] = {"join": options.read_join_code(join), "coordinator": coordinator, "insecure": insecure}
    place |= {"state": state, "policy": policy, "crew__mesh": mesh, "crew__nproc": nproc}
    place |= {"metrics": metrics}
    settings, named = _checked(config, overriding(overrides, site=site, **place), tasks, is_check=check)
    if check:
        _print_effective(settings, tasks, json)
        return
    import asyncio

    from atoll.cli import log
    from atoll.cli.serving.dialled import dialled
    from atoll.cli.serving.metrics import opened, served_agent
    from atoll.cli.serving.spans import sender_of
    from atoll.client.process import run_agent
    from atoll.operations.temporary import writing_to
    from atoll.protocol.build import software
    from atoll.protocol.wire.allocator import keep_freed_memory

    log.configure("agent", settings.site, log_form)
    keep_freed_memory()
    where = dialled(settings.coordinator, settings.join, settings.state / "identity")
    what = f"the agent of {settings.site} starts, for {', '.join(named)}, state in {settings.state}"
    note(f"{software()}: {what}; dialling {where}")
    with (
        opened("agent", settings.metrics) as telemetry,
        sender_of(settings.site) as spans,
        writing_to("state", settings.state),
    ):
        raise typer.Exit(asyncio.run(run_agent(settings, named, on_ready=served_agent(telemetry, spans))))


def _checked(
    path: Path | None, overrides: Sequence[str], references: Sequence[str], *, is_check: bool
) -> "tuple[AgentConfig, Mapping[str, str]]":
    """Read and check the agent's settings; return them, and the references of its tasks by name.

    Args:
        path: the file of the settings.
        overrides: `key=value`.
        references: the references of the tasks.
        is_check: nothing runs afterwards, so the tasks are loaded here, and everything is checked that they need.

    Raises:
        ConfigError: all mistakes in the settings, the policy and the tasks.
    """
    from atoll.cli.serving.agent_check import faults_at_the_site
    from atoll.client.config import AgentConfig
    from atoll.client.process import tasks_by_name
    from atoll.operations.load import missing_file
    from atoll.protocol.notices.settings import faults_of_machine
    from atoll.protocol.settings import ConfigError, load

    faults = [fault for reference in references if (fault := missing_file(reference)) is not None]
    settings, named = None, {}
    try:
        settings = load(AgentConfig, path, overrides)
    except ConfigError as error:
        faults += error.faults
    of_python = [] if settings is None else _faults_of_python(settings.python)
    if settings is not None:
        faults += [*_faults_of_policy(settings.policy), *of_python, *faults_of_machine(settings.notify)]
    try:
        named = tasks_by_name(references)
    except ConfigError as error:
        faults += error.faults
    if settings is not None and "state" not in settings.model_fields_set:  # several agents often start in one folder
        settings = settings.model_copy(update={"state": Path(f"atoll-agent-{settings.site}")})
    if settings is not None and named and is_check and not of_python:
        faults += faults_at_the_site(settings, references)
        faults += _faults_of_budgets(settings.policy, settings.state)
    if faults or settings is None:
        raise ConfigError(faults)
    return settings, named


def _faults_of_policy(path: Path | None) -> Sequence[str]:
    from atoll.client.policy.file import PolicyFile
    from atoll.protocol.settings import ConfigError

    try:
        PolicyFile(path)
    except ConfigError as error:
        return error.faults
    return ()


def _faults_of_budgets(path: Path | None, state: Path) -> list[str]:
    """Return the fault of a ledger of budgets that allows nothing."""
    from atoll.client.policy.budgets.report import read_budgets
    from atoll.client.policy.database import HistoryUnusable
    from atoll.client.policy.file import PolicyFile
    from atoll.protocol.settings import ConfigError

    try:
        policy = PolicyFile(path).policy
        if policy is not None and (privacy := policy.privacy).data:
            read_budgets(Path(privacy.ledger) if privacy.ledger else state, state, privacy.data)
    except ConfigError:
        return []  # it is told already
    except HistoryUnusable as error:
        return [str(error)]
    return []


def _faults_of_python(python: Path | None) -> list[str]:
    from atoll.training.worker.interpreter import fault_of_interpreter

    return [f"python: {fault}"] if python is not None and (fault := fault_of_interpreter(python)) else []


def _print_effective(settings: "AgentConfig", references: Sequence[str], json: bool) -> None:
    from atoll.operations.load import load_user_task
    from atoll.protocol.settings import effective

    if not settings.crew.mesh:
        say_settings(effective(settings), json=json)
        return
    tasks = {reference: load_user_task(reference) for reference in references}
    from atoll.cli.serving.crew_check import check_crew, document, note_crew

    needs = check_crew(settings.crew, tasks, settings.device)
    say_settings(effective(settings), json=json, **(document(needs) if json else {}))
    if not json:
        note_crew(settings.crew, needs)
