"""`atoll population`: show how a task's data is split among the clients of a simulation."""

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.printing import as_json, note, say, table
from atoll.cli.waiting import waiting_for
from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError

if TYPE_CHECKING:
    from atoll.simulations.federation.config import SimulationFile
    from atoll.simulations.populations.report import ClientSummary, Report

LABEL_COLUMNS_MAX = 20
"""The largest number of labels with a column each; with more, a row has the number of a client's distinct labels."""

What = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help="The task, `module:attribute` or `path/to/file.py:attribute`; or a run's TOML, which names one.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="TOML", help="A run's TOML with a table \\[population]; TASK replaces its task."),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE", help="Also draw a stacked bar of label counts for each client (PNG, SVG or PDF)."
    ),
]
Rows = Annotated[
    int,
    typer.Option(
        "--rows",
        metavar="N",
        callback=options.between(0),
        help="Number of clients in the table; --json has all clients.",
    ),
]


Statistics = Annotated[
    bool,
    typer.Option(
        "--statistics",
        help="Print the statistics of the clients' data instead, as `atoll run statistics` has them of the same sites.",
    ),
]


def population(
    task: What,
    config: Config = None,
    drop_empty: options.DropEmpty = False,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    plot: Plot = None,
    rows: Rows = 20,
    statistics: Statistics = False,
    json: options.Json = False,
) -> None:
    """Show the split of a task's data among clients by the settings `population.*`: examples and labels of each client.

    Nothing is trained. `atoll settings simulation` lists the kinds of splits; `docs/populations.md` explains them.
    """
    from atoll.operations.load import overriding
    from atoll.simulations.populations.plot import NoPlots
    from atoll.simulations.populations.plot import plot as draw

    overrides = overriding(overrides, population__drop_empty=drop_empty or None)
    if statistics:
        if plot is not None:
            raise CommandError("--plot draws the labels: leave out --statistics, or --plot")
        _say_statistics(task, config, overrides, json=json)
        return
    report = reported(task, config, overrides)
    if plot is not None:
        try:
            draw(report, plot)
        except (NoPlots, ValueError) as error:
            raise CommandError(f"{plot}: {error}") from error
    if json:
        as_json(report)
        return
    for line in report.notes:
        note(line)
    _say(report, rows)
    if plot is not None:
        say(f"drawn in {plot}")


def reported(task: str, config: Path | None, overrides: list[str]) -> "Report":
    """Return the report on the population that the arguments name.

    Raises:
        CommandError: the task is an ArrayTask, whose data cannot be split.
        ConfigError: all mistakes in the settings, or the reason why the split is impossible.
        TaskFailed: the task's code failed.
    """
    from atoll.operations.load import load_user_task
    from atoll.operations.task_failures import task_failures_in_one_line
    from atoll.simulations.populations.population import populate
    from atoll.simulations.populations.report import report
    from atoll.task.task import Task

    file = _loaded(task, config, overrides)
    found = load_user_task(file.task)
    if not isinstance(found, Task):
        raise CommandError(
            f"{file.task} is an ArrayTask, which reads its data itself; only the data of a Task is split"
        )
    dealing = waiting_for(f"the population of {file.task}", "its examples are split among the clients and counted")
    with task_failures_in_one_line(), dealing:
        return report(populate(file.population, found, file.seed))


def _loaded(task: str, config: Path | None, overrides: list[str]) -> "SimulationFile":
    from atoll.operations.load import is_toml, load_run
    from atoll.simulations.federation.config import SimulationFile

    if config is not None and is_toml(task):
        raise CommandError(f"--config {config}: {task} is a run's TOML already: name a task, or only one of the files")
    if config is None:
        return load_run(task, overrides, kind=SimulationFile)
    return load_run(str(config), [f"task={json_text.dumps(task)}", *overrides], kind=SimulationFile)


def _say_statistics(task: str, config: Path | None, overrides: list[str], *, json: bool) -> None:
    """Print the statistics of all clients and of each one, as `atoll run statistics` does."""
    from atoll.cli.runs.statistics import say_statistics
    from atoll.operations.load import load_user_task
    from atoll.operations.task_failures import task_failures_in_one_line
    from atoll.simulations.federation.statistics import statistics_of

    file = _loaded(task, config, overrides)
    found = load_user_task(file.task)
    with task_failures_in_one_line():
        result = statistics_of(file, found)
    if json:
        as_json(result)
    else:
        say_statistics(result)


def _say(report: "Report", num_rows: int) -> None:
    say(
        f"{report.kind}: {count_of(report.num_clients, 'client')}, "
        f"{count_of(report.examples, 'example')} to train on, seed {report.seed}"
    )
    say(
        f"examples of a client: {report.examples_min} to {report.examples_max}, median {report.examples_median:g}, "
        f"mean {report.examples_mean:.1f}"
    )
    if (labels := report.labels) is None:
        say(f"no labels: {report.no_labels}")
    else:
        say(
            f"labels of a client: {labels.per_client_min} to {labels.per_client_max} of {len(labels.labels)}, "
            f"median {labels.per_client_median:g}"
        )
        say(f"entropy of a client's labels: {labels.entropy_mean:.3f} bit of {labels.entropy_pooled:.3f} bit (mean)")
        say(f"distance from all labels: {labels.total_variation_mean:.3f} (total variation, mean)")
    if not num_rows:
        return
    say("")
    all_labels = () if labels is None else labels.labels
    columns = [str(label) for label in all_labels] if len(all_labels) <= LABEL_COLUMNS_MAX else []
    extra = {"test": report.test_examples > 0, "different labels": bool(all_labels and not columns)}
    extra["features"] = any(client.features for client in report.clients)
    heads = ["client", "examples", *(name for name, there in extra.items() if there), *columns]
    table(heads, [_row(client, extra, columns) for client in report.clients[:num_rows]], empty="")
    if (more := report.num_clients - num_rows) > 0:
        note(f"and {more} more: --rows {report.num_clients}, or --json")


def _row(client: "ClientSummary", extra: dict[str, bool], columns: list[str]) -> list[object]:
    labels = client.labels or {}
    values = {"test": client.test_examples, "different labels": len(labels), "features": client.features}
    counts = [labels.get(label) for label in columns]
    return [client.client, client.examples, *(values[name] for name, there in extra.items() if there), *counts]
