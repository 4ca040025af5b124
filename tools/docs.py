"""The generated parts of `docs/`: `python -m tools.docs` writes them from the code; tests hold them equal.

A part stands between two comments, and everything outside of them is written by hand:

    <!-- begin generated: settings run -->
    <!-- end generated -->

`python -m tools.docs commands.md` writes the named pages only.
"""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args

DOCS = Path(__file__).resolve().parents[1] / "docs"
SECTIONS = ("run", "coordinator", "aggregator", "agent", "policy", "local", "train", "plan", "privacy", "simulation")
PAGES = ("api.md", "authorisation.md", "commands.md", "configuration.md", "faults.md", "monitoring.md", "protocol.md")

MANY = 5
"""Commands from which on an option is explained once for all."""

_PART = re.compile(r"(<!-- begin generated: ([^>]+?) -->\n).*?(<!-- end generated -->)", re.DOTALL)


def render(page: str) -> str:
    """Return a page with its generated parts as the code has them now.

    Raises:
        KeyError: a part has a name without a generator.
    """
    return _PART.sub(lambda part: f"{part[1]}\n{_generate(part[2])}\n{part[3]}", page)


def parts(page: str) -> list[str]:
    """Return the names of the generated parts of a page."""
    return [part[2] for part in _PART.finditer(page)]


def commands() -> list[tuple[str, Any]]:
    """Return every command with its full name, such as `atoll run start`, in the order of `--help`."""
    from typer.main import get_command

    from atoll.cli.commands import app

    return list(_leaves("atoll", get_command(app)))


def _generate(part: str) -> str:
    kind, _, name = part.partition(" ")
    if kind == "python":
        from tools.python_reference import reference_of

        return reference_of(name)
    return _commands(name) if kind == "command" else _GENERATORS[part]()


def _settings(section: str) -> Callable[[], str]:
    def generate() -> str:
        from atoll.cli.sections import Section, described

        settings = described(Section(section))
        if section == "agent":  # the table `notify` is explained once, with the coordinator's
            known = described(Section.COORDINATOR)
            settings = [s for s in settings if s not in known]
        rows = [
            (f"`{s.key}`", _code(s.type), "required" if s.is_required else _code(s.default), s.doc) for s in settings
        ]
        return _table(("key", "type", "default", "meaning"), rows)

    return generate


def _words(module: str, union: str) -> Callable[[], str]:
    """Return a generator of the names and docstrings of a module's events or effects."""

    def generate() -> str:
        from importlib import import_module

        kinds: tuple[type, ...] = get_args(getattr(import_module(module), union))
        rows = [(f"`{kind.__name__}`", " ".join((inspect.getdoc(kind) or "").split())) for kind in kinds]
        return _table(("name", "meaning"), rows)

    return generate


def _steps(module: str) -> Callable[[], str]:
    """Return a generator of the crash points that a module names."""

    def generate() -> str:
        from importlib import import_module

        steps = import_module(module).STEPS
        return _table(("step", "what is true there"), [(f"`{name}`", truth) for name, truth in steps])

    return generate


def _rules() -> str:
    from atoll.server.identity.rules import RULES, Touches

    rows = []
    for method, rule in RULES.items():
        service, _, name = method.rpartition("/")
        roles = [f"{role}{'' if own is Touches.NOTHING else f' (for {own})'}" for role, own in rule.roles.items()]
        callers = "any caller" if rule.is_open else ", ".join(roles)
        rows.append((f"`{service[1:].rpartition('.')[2]}.{name}`", callers))
    return _table(("method", "allowed callers"), rows)


def _metrics() -> str:
    from atoll.telemetry.instruments import INSTRUMENTS

    rows = [
        (
            f"`{each.name}`",
            f"`{each.in_prometheus}`",
            str(each.kind),
            f"`{each.unit}`",
            ", ".join(f"`{attribute}`" for attribute in each.attributes) or "-",
            ", ".join(each.processes),
            each.description,
        )
        for each in INSTRUMENTS
    ]
    return _table(("metric", "in Prometheus", "kind", "unit", "attributes", "processes", "meaning"), rows)


def _spans() -> str:
    from atoll.telemetry.spans import SPANS

    return _span_table(SPANS)


def _agent_spans() -> str:
    from atoll.telemetry.spans import AGENT_SPANS

    return _span_table(AGENT_SPANS)


def _span_table(spans: Sequence[tuple[str, str]]) -> str:
    return _table(("span", "what it is"), [(f"`{name}`", meaning) for name, meaning in spans])


def _commands(name: str) -> str:
    """Return the reference of one command, or of each command of a group, such as `run`.

    Raises:
        KeyError: there is no such command or group.
    """
    found = [(path, command) for path, command in commands() if path.split()[1] == name]
    if not found:
        raise KeyError(name)
    return "\n\n".join(_command(path, command) for path, command in found)


@cache
def _shared() -> dict[str, str]:
    """Return the meaning of each option that many commands have, by its spelling; of several the most frequent."""
    found = Counter((_spelled(p), _meaning(p)) for _, command in commands() for p in command.params if p.name != "help")
    shared = [key for key, number in reversed(found.most_common()) if number >= MANY and key[0].startswith("--")]
    return dict(shared)


def _options() -> str:
    return _table(("option", "meaning"), [(f"`{spelling}`", meaning) for spelling, meaning in _shared().items()])


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, child in command.commands.items():
        yield from _leaves(f"{path} {name}", child)


def _command(path: str, command: Any) -> str:
    rows = [
        (
            f"`{_spelled(parameter)}`",
            _default(parameter),
            "" if _shared().get(_spelled(parameter)) == _meaning(parameter) else _meaning(parameter),
        )
        for parameter in command.params
        if parameter.name != "help"
    ]
    text = "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(command.help).split("\n\n"))
    return f"### `{path}`\n\n{text}\n\n{_table(('argument', 'default', 'meaning'), rows)}"


def _meaning(parameter: Any) -> str:
    return " ".join((getattr(parameter, "help", None) or "").split())


def _spelled(parameter: Any) -> str:
    """Return an argument as the command line takes it: `RUN`, `--state DIR`, `--plot/--no-plot`."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name)
    if parameter.is_flag:
        return "/".join((*parameter.opts, *parameter.secondary_opts))
    return f"{', '.join(parameter.opts)} {parameter.metavar or parameter.name.upper()}"


def _default(parameter: Any) -> str:
    """Return the default as the command line takes it; `-`: none, or one that a setting or the meaning names."""
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    if parameter.required:
        return "required"
    if default is True:
        return f"`{parameter.opts[0]}`"
    if default is False or default in (None, "", []):
        return "-"
    return f"`{default}`"


def _code(text: str) -> str:
    return f"`{text}`" if text else "none"


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(columns)
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_GENERATORS: dict[str, Callable[[], str]] = {
    **{f"settings {section}": _settings(section) for section in SECTIONS},
    "steps": _steps("atoll.ground.process.crash_points"),
    "rank steps": _steps("atoll.parallel.mesh_client.crash_points"),
    "rules": _rules,
    "metrics": _metrics,
    "spans": _spans,
    "agent spans": _agent_spans,
    "options": _options,
    "server events": _words("atoll.server.rounds.events", "Event"),
    "server effects": _words("atoll.server.rounds.events", "Effect"),
    "client events": _words("atoll.client.session.events", "Event"),
    "client effects": _words("atoll.client.session.events", "Effect"),
}


def main(names: Sequence[str] = PAGES) -> None:
    """Write the generated parts of the named pages."""
    for name in names:
        path = DOCS / name
        old = path.read_text("utf-8")
        new = render(old)
        if new != old:
            path.write_text(new, "utf-8")
        sys.stdout.write(f"{path.name}: {'written' if new != old else 'up to date'}\n")


if __name__ == "__main__":
    main(sys.argv[1:] or PAGES)
