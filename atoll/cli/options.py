"""The options and arguments that several commands share."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import click
import typer

from atoll.cli import completion
from atoll.cli.waiting import waiting_for
from atoll.ground.text_files import NotText, text_of
from atoll.operations.faults import CommandError
from atoll.operations.requests import DROP_EMPTY, SET

State = Annotated[Path, typer.Option("--state", metavar="DIR", help="The coordinator's state directory.")]
StateOfRun = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help="The coordinator's state directory; by default `coordinator.state` of the TOML, or atoll-state.",
    ),
]
Database = Annotated[
    str,
    typer.Option(
        "--database",
        metavar="URL",
        help="Read the records from this PostgreSQL database; the state directory may then be on another machine.",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Address of the coordinator; by default the one from enrolment; short for coordinator.",
    ),
]
Set = Annotated[
    list[str],
    typer.Option(SET.flag, metavar=SET.metavar, help=SET.help, autocompletion=completion.settings),
]
Check = Annotated[bool, typer.Option("--check", help="Check everything, print the effective settings, and exit.")]
CheckJson = Annotated[bool, typer.Option("--json", help="With --check: print the effective settings as JSON.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Log = Annotated[
    str,
    typer.Option(
        "--log",
        metavar="text|json",
        click_type=click.Choice(["text", "json"]),
        envvar="ATOLL_LOG",
        help="Form of the log's lines on standard error: for a person, or JSON objects for a program.",
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="Serve metrics for Prometheus at this address; needs the extra telemetry. By default none; short for the "
        "setting metrics.",
        show_default=False,
    ),
]
DropEmpty = Annotated[bool, typer.Option("--drop-empty", help=DROP_EMPTY.help)]
Insecure = Annotated[
    bool | None,
    typer.Option("--insecure", help="Use no certificates and no encryption; loopback only.", show_default=False),
]
Follow = Annotated[
    bool, typer.Option("--follow", help="Keep running, and print the events as they happen; Ctrl-C stops it.")
]
Run = Annotated[
    str,
    typer.Option(
        "--run",
        metavar="RUN",
        help="Id or name of the run; by default the newest run.",
        autocompletion=completion.runs,
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Id of the run, such as digits-1, or its name.", autocompletion=completion.runs),
]


def json_only_with(check: bool, json: bool) -> None:
    """Refuse --json without --check, in a command whose output is a log.

    Raises:
        CommandError: --json without --check.
    """
    if json and not check:
        raise CommandError("--json prints the settings of --check: add --check, or leave --json out; a log is not JSON")


def between(least: float, most: float = math.inf) -> Callable[[float | None], float | None]:
    """Return a check that a number, where one is given, lies between two bounds.

    Its message has the value, which typer's `min` and `max` omit.
    """
    allowed = f"at least {_exact(least)}" + (f", at most {_exact(most)}" if most < math.inf else "")

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            raise typer.BadParameter(f"got {_exact(value)}; allowed: {allowed}")
        return value

    return check


def _exact(value: float) -> str:
    """Return a whole number with all its digits, any other one in six."""
    return str(value) if isinstance(value, int) else f"{value:g}"


Last = Annotated[
    int | None,
    typer.Option(
        "--last",
        metavar="N",
        callback=between(1, 2**31 - 1),
        help="Print the newest N only; by default 1,000, or after --after the first 1,000.",
    ),
]
After = Annotated[
    int | None,
    typer.Option(
        "--after",
        metavar="N",
        callback=between(0, 2**31 - 1),
        help="Print those after number N only; 0: from the first on.",
    ),
]


def read_join_code(text: str | None) -> str | None:
    """Read a join code from an argument: the code itself, `-` for standard input, or `@FILE`.

    The last two show in no list of processes.
    """
    from atoll.protocol.identity.join_code import TEXT_MAX

    if text is not None and text.startswith("@"):
        try:
            with open(text[1:], "rb") as file:
                return text_of(file.read(2 * TEXT_MAX + 4), text[1:]).strip()
        except OSError as error:
            raise CommandError(f"--join {text}: {error.strerror}") from error
        except NotText as error:
            raise CommandError(f"--join {text}: {error}") from error
    if text != "-":
        return text
    with waiting_for("the join code on standard input", "until its end, Ctrl-D on a terminal"):
        try:
            return text_of(sys.stdin.buffer.read(2 * TEXT_MAX + 4), "standard input").strip()
        except NotText as error:
            raise CommandError(str(error)) from error
