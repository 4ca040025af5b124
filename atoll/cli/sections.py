"""The sections of `atoll settings`, with their settings, as the command prints them and a shell completes them."""

import dataclasses
import json
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any, get_type_hints

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
    PRIVACY = "privacy"
    SIMULATION = "simulation"


def described(section: Section) -> "list[Setting]":
    """Return the settings of a section, with the keys that --set takes."""
    from atoll.client.config import AgentConfig
    from atoll.client.policy.config import SitePolicy
    from atoll.protocol.settings import describe
    from atoll.server.config.process import AggregatorConfig, HostFile
    from atoll.server.config.run import RunConfig, RunFile
    from atoll.simulations.federation.config import SimulationFile

    if section in (Section.LOCAL, Section.TRAIN, Section.PLAN, Section.PRIVACY):
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
    from atoll.parallel.trainer.config import TrainConfig
    from atoll.protocol.attribute_docs import attribute_docs
    from atoll.protocol.settings import Setting, type_text
    from atoll.task.local import Local
    from atoll.training.private.config import PrivacyConfig

    kinds = {
        Section.LOCAL: Local,
        Section.TRAIN: TrainConfig,
        Section.PLAN: Plan,
        Section.PRIVACY: PrivacyConfig,
    }
    docs, hints = attribute_docs(kinds[section]), get_type_hints(kinds[section])
    for field in dataclasses.fields(kinds[section]):
        if field.default is dataclasses.MISSING:
            continue  # the option --mesh sets the mesh
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
