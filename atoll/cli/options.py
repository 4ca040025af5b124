"""The options that several commands share."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

STATE = Path("atoll-state")
"""Where a coordinator keeps its state when nothing else is said; the default of `coordinator.state`."""

State = Annotated[Path, typer.Option("--state", metavar="DIR", help="The coordinator's state directory.")]
Database = Annotated[
    str,
    typer.Option(
        "--database",
        metavar="URL",
        help="PostgreSQL instead of what the state directory says, which may then be on another machine.",
    ),
]
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; repeatable. `atoll settings` lists all."),
]
Check = Annotated[bool, typer.Option("--check", help="Check everything, print the effective settings, and exit.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Insecure = Annotated[
    bool | None,
    typer.Option("--insecure", help="Prove nothing and encrypt nothing; on this machine only.", show_default=False),
]


def between(least: float, most: float = math.inf) -> Callable[[float | None], float | None]:
    """A check of what was given, if anything was, that names the value: typer's own `min` and `max` do not."""
    allowed = f"at least {least:g}" + (f", at most {most:g}" if most < math.inf else "")

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            raise typer.BadParameter(f"got {value:g}; allowed: {allowed}")
        return value

    return check


Run = Annotated[str, typer.Option("--run", metavar="RUN", help="Id or name of the run; by default the newest one.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, such as digits-1.")]
