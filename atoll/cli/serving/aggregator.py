"""`atoll aggregator`: run one aggregation rank."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.command import current, if_stopped
from atoll.cli.printing import note, say_settings

if TYPE_CHECKING:
    from atoll.protocol.identity.keeper import Keeper
    from atoll.server.ranks.rank import Rank as AggregationRank

Join = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="CODE",
        help="The join code, at the first start; `atoll client invite N --role aggregator` prints it; - reads it from "
        "standard input.",
    ),
]
Rank = Annotated[
    int | None,
    typer.Option("--rank", metavar="N", help="Number of this rank, from 0, required here or as rank in the settings."),
]
Ranks = Annotated[
    int | None,
    typer.Option("--of", metavar="N", help="Number of all ranks, required here or as ranks in the settings."),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="Address that receives updates; by default 127.0.0.1 with the last port; short for listen.",
    ),
]
State = Annotated[
    Path | None,
    typer.Option(
        "--state", metavar="DIR", help="The rank's state directory, required here or as state in the settings."
    ),
]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML of the rank's settings.")]
WithParent = Annotated[bool, typer.Option("--with-parent", hidden=True, help="End when standard input ends.")]


def aggregator(
    coordinator: options.Coordinator = None,
    join: Join = None,
    insecure: options.Insecure = None,
    rank: Rank = None,
    ranks: Ranks = None,
    listen: Listen = None,
    state: State = None,
    config: Config = None,
    metrics: options.Metrics = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    check: options.Check = False,
    json: options.CheckJson = False,
    log_form: options.Log = "text",
    with_parent: WithParent = False,
) -> None:
    """Run one aggregation rank: receive updates, store a part of the model, fold with the other ranks.

    `atoll coordinator --aggregators N` starts N ranks by itself. This command is for ranks on other machines or under
    your own supervisor; the coordinator then needs `coordinator.start_aggregators=false`. A rank may be restarted at
    any time: every update that it has acknowledged is in its directory.
    """
    if_stopped("before it dialled")
    from atoll.operations.load import check_folder, overriding
    from atoll.protocol.settings import effective, load
    from atoll.server.config.process import AggregatorConfig

    options.json_only_with(check, json)
    place = {"rank": rank, "ranks": ranks, "listen": listen, "state": state, "metrics": metrics}
    given = overriding(
        overrides, coordinator=coordinator, join=options.read_join_code(join), insecure=insecure, **place
    )
    settings = load(AggregatorConfig, config, given)
    check_folder("state", settings.state)
    if check:
        say_settings(effective(settings), json=json)
        return
    import asyncio

    from atoll.cli import log
    from atoll.cli.serving.dialled import dialled
    from atoll.cli.serving.metrics import opened, serve_rank
    from atoll.operations.temporary import writing_to
    from atoll.protocol import service_manager
    from atoll.protocol.build import software
    from atoll.server.ranks.process import host_rank

    log.configure("rank", form=log_form)
    where = dialled(settings.coordinator, settings.join, settings.state / "identity")
    note(f"{software()}: aggregation rank {settings.rank} of {settings.ranks} starts; dialling {where}")

    def ready(served: "AggregationRank", keeper: "Keeper | None", address: str) -> None:
        serve_rank(telemetry, served, keeper)
        service_manager.tell(service_manager.READY, f"rank {settings.rank} of {settings.ranks} on {address}")
        note(f"atoll aggregator, rank {settings.rank} of {settings.ranks}, on {address}, state in {settings.state}")

    with opened("rank", settings.metrics) as telemetry, writing_to("state", settings.state):
        asyncio.run(host_rank(settings, with_parent=with_parent, on_ready=ready, on_end=current().end_in_time))
