"""What a file may import because of what it is: pure rules, mathematics without a shell, operations without a terminal.

A pure file imports the pure part of the standard library, other pure files, and what the table allows it beyond these.
"""

import ast
from collections.abc import Iterable, Iterator, Set
from pathlib import PurePosixPath

from tests.house.tree import Fault, Module

STDLIB = frozenset(
    {
        *("abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "fractions", "functools", "hashlib"),
        *("heapq", "itertools", "math", "operator", "random", "typing"),
    }
)
"""Modules of the standard library that a pure file may import."""

PURE = {
    "aggregation/fold/weights.py": "",
    "tensors/updates/weight.py": "",
    "training/statistics/exact.py": "",
    "training/statistics/parts.py": "",
    "task/errors.py": "",
    "task/metrics.py": "atoll.task.told",  # logs what a metric is left out for
    "ground/backoff.py": "",
    "plugins/guard.py": "inspect",  # looks for a parameter
    "protocol/disclosure.py": "",
    "protocol/displaced.py": "",
    "client/policy/disclosure.py": "",
    "client/policy/small_cells.py": "",
    "client/session": "atoll.protocol.secure.terms atoll.training.statistics.question",  # values, and their readers
    "client/session/rollback_rules.py": "atoll.protocol.identity.clock_hint",  # the instants in words
    "protocol/audit/recovery.py": "atoll.protocol.audit.chain mmap re",  # handed a file's bytes
    "protocol/notices/book.py": "atoll.protocol.notices.notice",
    "protocol/notices/notice.py": "",
    "protocol/identity/names.py": "re",
    "protocol/privacy": "",
    "protocol/privacy/loss_distribution.py": "dp_accounting importlib",  # the one user of an optional library
    "protocol/secure/session_size.py": "",
    "ground/faults.py": "",
    "ground/printable.py": "difflib",
    "protocol/wire/mesh_use.py": "",
    "protocol/paging.py": "",
    "protocol/value_type.py": "",
    "protocol/vocabulary.py": "",
    "atoll/drills/troubles.py": "random",  # a generator for each seed
    "atoll/exports/rows.py": "",
    "atoll/exports/wandb_file.py": "struct zlib",
    "atoll/telemetry/instruments.py": "",
    "simulations/experiments/bands.py": "atoll.simulations.experiments.report",  # its types
    "server/following/follower.py": "atoll.server.views.sentences",  # pure, but for `json`
    "server/following/items.py": "",
    "server/views/exchange_sentences.py": "",
    "server/views/message_lines.py": "",
    "server/views/narration.py": "",
    "server/views/pages.py": "",
    "server/views/reasons.py": "",
    "server/views/secure_sums.py": "atoll.protocol.secure.messages atoll.server.sessions.session",  # their types
    "server/views/thinning.py": "",
    "server/views/notices.py": "atoll.protocol.identity.clock_hint atoll.server.identity.register",
    "server/backup/contents.py": "pydantic re",
    "server/exchanges": "",
    "server/identity/rules.py": "",
    "server/names/conflicts.py": "atoll.ground.bounded_mapping",
    "server/invariants.py": "",
    "server/members": "",
    "server/rounds": "",
    "server/rounds/session_events.py": "atoll.protocol.secure.messages",  # values
    "server/rounds/one_sum.py": "atoll.protocol.secure.messages atoll.server.sessions.session",
    "server/rounds/secure_evaluation.py": "atoll.protocol.secure atoll.server.sessions",
    "server/rounds/secure_round.py": "atoll.protocol.secure atoll.server.sessions",  # its sessions
    "server/rounds/policy.py": "pydantic",
    "server/rounds/waiting.py": "datetime",  # writes the instants that it is handed
    "server/parts": "",
    "server/sessions": "atoll.protocol.secure",  # checks signatures; no clock, no randomness
    "server/selection": "",
    "server/statistics/collection.py": "",
    "server/statistics/merging.py": "",
}
"""Pure folders, with everything below them, and pure files; the names that each may import beyond the pure.

A file's entry inside a pure folder adds to the folder's.
"""

WITHOUT_SHELL = {"ground", "plugins", "tensors", "task", "training", "flower", "parallel", "aggregation"}
"""Rooms of mathematics and training: no gRPC, no asyncio, no clock."""

MONOTONIC = {
    "parallel/mesh_client/supervisor/crew.py",
    "parallel/mesh_client/main.py",
    "parallel/mesh_client/orders.py",
    "parallel/mesh_client/supervisor/shared_folder.py",
    "parallel/mesh_client/supervisor/terms.py",
    "parallel/launch/line.py",
    "parallel/launch/meeting.py",
    "training/worker/inbox.py",
    "training/worker/main.py",
    "training/worker/process.py",
}
"""The only files of these rooms that read a clock: the monotonic one."""

SILENT = "atoll/operations"
"""The folder whose functions print nothing: the command line prints, the Python interface returns."""
SPOKEN = {"typer", "click", "rich", "print", "sys.stdout.write", "sys.stderr.write", "os.write"}


def faults(modules: Iterable[Module]) -> list[Fault]:
    """Report what files import, read or call and may not."""
    return [Fault(module.path, line, text) for module in modules for line, text in sorted(_faults(module))]


def _faults(module: Module) -> Iterator[tuple[int, str]]:
    names = list(module.imports())
    if not _places(module.path).isdisjoint(PURE):
        yield from ((line, f"{name}, in a pure file") for line, name in names if not _is_pure(module.path, name))
    if module.room in WITHOUT_SHELL:
        used = [*names, *_clocks(module.tree)]
        yield from ((line, f"{name}, in {module.room}") for line, name in used if _is_shell(module.path, name))
    if SILENT in _places(module.path):
        spoken = [*names, *_calls(module.tree)]
        yield from ((line, f"{name}, in an operation") for line, name in spoken if _is_of(name, SPOKEN))


def unknown_places(modules: Iterable[Module]) -> list[str]:
    """Return the places of the tables that no file belongs to."""
    return sorted({*PURE, *MONOTONIC, SILENT}.difference(*(_places(module.path) for module in modules)))


def _places(path: str) -> set[str]:
    """Return a path and the folders above it."""
    return {path, *map(str, PurePosixPath(path).parents)}


def _is_pure(path: str, name: str) -> bool:
    allowed = {extra for place in _places(path).intersection(PURE) for extra in PURE[place].split()}
    pure = {"atoll." + place.removesuffix(".py").removeprefix("atoll/").replace("/", ".") for place in PURE}
    return _is_of(name, STDLIB | allowed | pure)


def _is_shell(path: str, name: str) -> bool:
    if _is_of(name, {"time"}):
        return name != "time" and not (name == "time.monotonic" and path in MONOTONIC)
    return _is_of(name, {"grpc", "asyncio", "datetime"}) and name != "datetime.timedelta"


def _is_of(name: str, modules: Set[str]) -> bool:
    """Return whether a dotted name is one of these modules or in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _clocks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield `time.x` wherever it is used, under whatever name: importing `time` does not say which clock is read."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names = {alias.asname or alias.name for alias in aliases if alias.name == "time"}
    for node in ast.walk(tree) if names else ():
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            yield node.lineno, f"time.{node.attr}"


def _calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the name of each function that is called."""
    return ((node.lineno, ast.unparse(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call))
