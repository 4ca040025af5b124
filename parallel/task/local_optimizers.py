"""The names that installed packages give to local optimizers. A run may name one; it sends no reference to code."""

from atoll.aggregation.entry_points import NAME, declared

GROUP = "atoll.local_optimizers"


def is_declared(name: str) -> bool:
    """Return whether exactly one installed package declares a local optimizer of this name. Imports no code."""
    return NAME.fullmatch(name) is not None and len(declared(GROUP).get(name, ())) == 1


def load(name: str) -> object:
    """Import a package's local optimizer.

    Raises:
        LookupError: not exactly one installed package declares the name.
        Exception: any error of the package's code.
    """
    if not is_declared(name):
        raise LookupError(f"no installed package, or more than one, declares {name!r} in {GROUP}")
    return declared(GROUP)[name][0].load()
