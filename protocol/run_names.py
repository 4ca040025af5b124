"""The run that an operator names, by its id or by the name in its settings. Pure."""

from collections.abc import Iterable

from atoll.ground.printable import instead_of


class RunNotNamed(LookupError):
    """Error: a string names no run, or several; the message names the known ones."""


def newest_named(named: str, runs: Iterable[tuple[str, str]]) -> str:
    """Return the id of the run with this id, or else of the newest run with this name.

    Args:
        named: an id, such as digits-1, or a name, such as digits.
        runs: the id and the name of each run, the newest last.

    Raises:
        RunNotNamed: no run has this id or name.
    """
    return _all_named(named, list(runs))[-1]


def only_named(named: str, runs: Iterable[tuple[str, str]]) -> str:
    """Return the id of the run with this id, or else of the only one with this name, for irreversible operations.

    Raises:
        RunNotNamed: no run has this id or name, or several have the name.
    """
    found = _all_named(named, list(runs))
    if len(found) > 1:
        raise RunNotNamed(f"{len(found)} runs have the name {named}: name one of {', '.join(found)}")
    return found[0]


def _all_named(named: str, runs: list[tuple[str, str]]) -> list[str]:
    ids = [run_id for run_id, _ in runs]
    found = [named] if named in ids else [run_id for run_id, name in runs if name == named]
    if not found:
        raise RunNotNamed(f"there is no run {named!r}{instead_of(named, ids)}")
    return found
