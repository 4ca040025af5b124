"""Purity by folder: code that knows no clock, socket, file or randomness but what it is handed.

A pure file imports the pure part of the standard library, other pure files, and what the table allows it beyond these.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from tests.house.imports import imported_names
from tests.house.tree import Fault, Module, dotted

STDLIB = frozenset(
    {
        *("abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "fractions", "functools", "hashlib"),
        *("heapq", "itertools", "math", "operator", "random", "typing"),
    }
)
"""Modules of the standard library that a pure file may import."""

NOTHING: frozenset[str] = frozenset()

PURE: dict[str, frozenset[str]] = {
    "aggregation/fold/weights.py": NOTHING,
    "tensors/updates/weight.py": NOTHING,
    "training/statistics/exact.py": NOTHING,
    "training/statistics/parts.py": NOTHING,
    "task/errors.py": NOTHING,
    "task/metrics.py": frozenset({"atoll.task.told"}),  # logs what a metric is left out for
    "ground/backoff.py": NOTHING,
    "plugins/guard.py": frozenset({"inspect"}),  # looks for a parameter
    "protocol/disclosure.py": NOTHING,
    "protocol/displaced.py": NOTHING,
    "client/policy/content.py": frozenset({"json"}),
    "client/policy/disclosure.py": NOTHING,
    "client/policy/small_cells.py": NOTHING,
    "client/session": NOTHING,
    "client/session/rollback_rules.py": frozenset({"atoll.protocol.identity.clock_hint"}),  # the instants in words
    "protocol/audit/recovery.py": frozenset({"atoll.protocol.audit.chain", "mmap", "re"}),  # handed a file's bytes
    "protocol/notices/book.py": frozenset({"atoll.protocol.notices.notice"}),
    "protocol/notices/notice.py": NOTHING,
    "protocol/identity/names.py": frozenset({"re"}),
    "ground/printable.py": frozenset({"difflib"}),
    "protocol/wire/mesh_use.py": NOTHING,
    "protocol/value_type.py": NOTHING,
    "protocol/vocabulary.py": NOTHING,
    "atoll/exports/rows.py": NOTHING,
    "atoll/exports/wandb_file.py": frozenset({"struct", "zlib"}),
    "simulations/experiments/bands.py": frozenset({"atoll.simulations.experiments.report"}),  # its types
    "server/following/follower.py": frozenset({"atoll.server.views.sentences"}),  # pure, but for `json`
    "server/following/items.py": NOTHING,
    "server/views/exchange_sentences.py": NOTHING,
    "server/views/message_lines.py": NOTHING,
    "server/views/narration.py": NOTHING,
    "server/views/reasons.py": NOTHING,
    "server/views/notices.py": frozenset({"atoll.protocol.identity.clock_hint", "atoll.server.identity.register"}),
    "server/backup/contents.py": frozenset({"pydantic", "re"}),
    "server/exchanges": NOTHING,
    "server/identity/rules.py": NOTHING,
    "server/names/conflicts.py": frozenset({"atoll.ground.bounded_mapping"}),
    "server/rounds": NOTHING,
    "server/rounds/policy.py": frozenset({"pydantic"}),
    "server/rounds/waiting.py": frozenset({"datetime"}),  # writes the instants that it is handed
    "server/parts": NOTHING,
    "server/selection": NOTHING,
    "server/statistics/collection.py": NOTHING,
    "server/statistics/merging.py": NOTHING,
}
"""Pure folders, with everything below them, and pure files; what each may import beyond the pure.

A file's entry inside a pure folder adds to the folder's.
"""

NOT_PURE: frozenset[str] = frozenset()
"""Files of pure folders that are exempt, and that no pure file may import."""


@dataclass(frozen=True)
class Purity:
    """The table: pure folders and files with the extra imports of each, and exempt files inside the folders."""

    pure: Mapping[str, Set[str]] = field(default_factory=lambda: PURE)
    exempt: Set[str] = NOT_PURE
    stdlib: Set[str] = STDLIB

    def covers(self, path: str) -> bool:
        """Return whether the file at a path has to be pure."""
        return path not in self.exempt and any(_is_at(path, place) for place in self.pure)

    def may_import(self, path: str, name: str) -> bool:
        """Return whether a pure file may import a full dotted name."""
        extra = {allowed for place, more in self.pure.items() if _is_at(path, place) for allowed in more}
        if _is_within(name, extra | self.stdlib):
            return True
        is_pure = _is_within(name, {dotted(place) for place in self.pure})
        return is_pure and not _is_within(name, {dotted(file) for file in self.exempt})


def impure_imports(purity: Purity, modules: Iterable[Module]) -> list[Fault]:
    """Report what pure files import and may not."""
    return [
        Fault(module.path, line, f"imports {name}, and has to be pure")
        for module in modules
        if purity.covers(module.path)
        for line, name in imported_names(module)
        if not purity.may_import(module.path, name)
    ]


def absent_places(purity: Purity, paths: Iterable[str]) -> list[str]:
    """Return the entries of the table that no file of the repository belongs to."""
    known = list(paths)
    return sorted(place for place in {*purity.pure, *purity.exempt} if not any(_is_at(path, place) for path in known))


def _is_at(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}/")


def _is_within(name: str, modules: Set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
