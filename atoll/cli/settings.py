"""`atoll settings`: print every setting with its type, default and meaning."""

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from atoll.cli import options
from atoll.cli.printing import as_json, say

if TYPE_CHECKING:
    from pydantic import BaseModel

    from atoll.protocol.settings import Setting


class Section(StrEnum):
    """The settings of one process, file or dataclass."""

    RUN = "run"
    COORDINATOR = "coordinator"
    AGGREGATOR = "aggregator"
    AGENT = "agent"
    POLICY = "policy"
    LOCAL = "local"
    TRAIN = "train"
    PLAN = "plan"
    SIMULATION = "simulation"


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
    Section.SIMULATION: "A simulation: in the run's TOML, beside the settings of a run, or --set on `atoll simulate`",
}


def described(section: Section) -> "list[Setting]":
    """Return the settings of a section, with the keys that --set takes."""
    from atoll.client.config import AgentConfig
    from atoll.client.policy.config import SitePolicy
    from atoll.protocol.settings import describe
    from atoll.server.config.process import AggregatorConfig, HostFile
    from atoll.server.config.run import RunConfig, RunFile
    from atoll.simulations.federation.config import SimulationFile

    if section in (Section.LOCAL, Section.TRAIN, Section.PLAN):
        return list(_described_fields(section))
    models: dict[Section, type[BaseModel]] = {
        Section.RUN: RunConfig,
        Section.COORDINATOR: HostFile,
        Section.AGGREGATOR: AggregatorConfig,
        Section.AGENT: AgentConfig,
        Section.POLICY: SitePolicy,
        Section.SIMULATION: SimulationFile,
    }
    others = {setting.key for setting in describe(RunFile)} if section is Section.SIMULATION else set()
    return [setting for setting in describe(models[section]) if setting.key not in others]


def _described_fields(section: Section) -> "Iterator[Setting]":
    """Yield the settings of a section that is a dataclass, one for each field with a default."""
    from atoll.parallel.engine.plan import Plan
    from atoll.parallel.task.local import Local
    from atoll.parallel.trainer.config import TrainConfig
    from atoll.protocol.attribute_docs import attribute_docs
    from atoll.protocol.settings import Setting, type_text

    kinds = {Section.LOCAL: Local, Section.TRAIN: TrainConfig, Section.PLAN: Plan}
    docs, hints = attribute_docs(kinds[section]), get_type_hints(kinds[section])
    for field in dataclasses.fields(kinds[section]):
        if field.default is dataclasses.MISSING:
            continue  # the mesh has an option of its own, --mesh
        may_be_none = type(None) in getattr(hints[field.name], "__args__", ())
        yield Setting(
            key=f"{section}.{field.name}",
            type=type_text(hints[field.name]) + (' | "none"' if may_be_none else ""),
            default=_toml(field.default),
            doc=docs[field.name],
            is_required=False,
        )


def _toml(value: Any) -> str:
    return json.dumps("none" if value is None else value, ensure_ascii=False, default=str)
