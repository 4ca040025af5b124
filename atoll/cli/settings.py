"""`atoll settings`: every setting, with its type, default and meaning."""

import ast
import dataclasses
import inspect
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
    """Whose settings."""

    RUN = "run"
    COORDINATOR = "coordinator"
    AGGREGATOR = "aggregator"
    AGENT = "agent"
    LOCAL = "local"


Which = Annotated[
    Section | None,
    typer.Argument(metavar="[run|coordinator|aggregator|agent|local]", help="Whose settings; by default all."),
]


def settings(which: Which = None, json: options.Json = False) -> None:
    """Explain every setting: of a run, the coordinator, a rank of the aggregation, an agent, the local training."""
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
    Section.AGGREGATOR: "A rank of the aggregation: its TOML (--config), or --set on `atoll aggregator`",
    Section.AGENT: "An agent: its TOML (--config), or --set on `atoll agent`",
    Section.LOCAL: "The local training: the task's `Local`, and the table [local] of a run's TOML over it",
}


def described(section: Section) -> "list[Setting]":
    """The settings of a section, with the keys that --set takes."""
    from atoll.client.config import AgentConfig
    from atoll.protocol.settings import describe
    from atoll.server.config import AggregatorConfig, HostFile, RunConfig

    if section is Section.LOCAL:
        return list(_described_local())
    models: dict[Section, type[BaseModel]] = {
        Section.RUN: RunConfig,
        Section.COORDINATOR: HostFile,
        Section.AGGREGATOR: AggregatorConfig,
        Section.AGENT: AgentConfig,
    }
    return describe(models[section])


def _described_local() -> "Iterator[Setting]":
    from atoll.parallel.local import Local
    from atoll.protocol.settings import Setting, type_text

    docs, hints = _attribute_docs(Local), get_type_hints(Local)
    for field in dataclasses.fields(Local):
        may_be_none = type(None) in getattr(hints[field.name], "__args__", ())
        yield Setting(
            key=f"local.{field.name}",
            type=type_text(hints[field.name]) + (' | "none"' if may_be_none else ""),
            default=_toml(field.default),
            doc=docs[field.name],
            is_required=False,
        )


def _attribute_docs(kind: type) -> dict[str, str]:
    """The strings under the fields of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(field.target, ast.Name):
            docs[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{"none" if value is None else value}"' if value is None or isinstance(value, str) else repr(value)
