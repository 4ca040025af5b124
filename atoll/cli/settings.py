"""`atoll settings`: print every setting with its type, default and meaning."""

import textwrap
from typing import Annotated

import typer

from atoll.cli import options
from atoll.cli.printing import as_json, say
from atoll.cli.sections import Section, described
from atoll.ground.process.loading import loading

Which = Annotated[
    Section | None,
    typer.Argument(
        metavar="[run|coordinator|aggregator|agent|policy|local|train|plan|simulation]",
        help="The settings to print; by default all.",
    ),
]


def settings(which: Which = None, json: options.Json = False) -> None:
    """Print every setting with its type, default and meaning.

    The sections: a run, the coordinator, an aggregation rank, an agent, a site's policy, the local training, a
    centralized training, its parallel plan, and a simulation.
    """
    with loading():  # the models of all sections
        sections = {section: described(section) for section in Section if which in (None, section)}
    if json:
        as_json(sections)
        return
    for section, found in sections.items():
        say(f"# {_TITLES[section]}\n")
        for setting in found:
            default = "required" if setting.is_required else f"default {setting.default or 'none'}"
            say(f"{setting.key}  ({setting.type}; {default})")
            say(textwrap.fill(setting.doc, 100, initial_indent="    ", subsequent_indent="    ") + "\n")


_TITLES = {
    Section.RUN: "A run: its TOML, or --set on `atoll coordinator` and `atoll run start`",
    Section.COORDINATOR: "The coordinator: the table [coordinator] of a TOML, or --set on `atoll coordinator`",
    Section.AGGREGATOR: "An aggregation rank: its TOML (--config), or --set on `atoll aggregator`",
    Section.AGENT: "An agent: its TOML (--config), or --set on `atoll agent`",
    Section.POLICY: "A site's own policy: the TOML that `atoll agent --policy` names",
    Section.LOCAL: "The local training: the task's `Local`, overridden by the table [local] of a run's TOML",
    Section.TRAIN: "A centralized training: --set on `atoll train`",
    Section.PLAN: "The parallel plan of a centralized training: --set on `atoll train`, beside --mesh and --zero",
    Section.PRIVACY: "The privacy of a centralized training: --set on `atoll train`",
    Section.SIMULATION: "A simulation: in the run's TOML, beside the settings of a run, or --set on `atoll simulate`",
}
