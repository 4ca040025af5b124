"""Sites without training examples, and clients with too few: the refusal, and the note on omitted clients."""

from collections.abc import Iterator, Mapping, Sequence

from atoll.ground.printable import count_of, some_of
from atoll.simulations.populations.config import PopulationConfig

SHOWN_MAX = 5
"""Maximum number of sites that a refusal or a note names."""

WAY_OUT = "--drop-empty (population.drop_empty = true) leaves them out"


def faults_of_sizes(config: PopulationConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the reasons why the task's sites cannot be the clients, one for all sites of a kind.

    Args:
        config: the settings, with `min_examples` and `drop_empty`.
        sizes: the number of training examples of each site.
    """
    empty = [site for site, size in sizes.items() if not size]
    if len(empty) == len(sizes):
        yield f"{_have(empty, 'no example to train on')}, and there is no other site"
    elif empty and not config.drop_empty:
        yield f"{_have(empty, 'no example to train on')}: {WAY_OUT}"
    small = [site for site, size in sizes.items() if 0 < size < config.min_examples]
    if small:
        least = min(sizes[site] for site in small)
        few = count_of(least, "example") + (" or a few more" if len(small) > 1 else "")
        yield f"{_have(small, few)} to train on, and min_examples is {config.min_examples}"


def dropping(dropped: Sequence[str], num_all: int) -> str:
    """Return the note on the omitted clients, of `num_all`."""
    what = "has no training examples and is" if len(dropped) == 1 else "have no training examples and are"
    names = some_of(dropped, SHOWN_MAX)
    return f"{len(dropped)} of {count_of(num_all, 'client')} {what} left out, of evaluations too: {names}"


def _have(sites: Sequence[str], what: str) -> str:
    """Return `site 'a' has WHAT`, or `7 sites have WHAT ('a', 'b', ...)`."""
    if len(sites) == 1:
        return f"site {sites[0]!r} has {what}"
    return f"{count_of(len(sites), 'site')} ({some_of(map(repr, sites), SHOWN_MAX)}) have {what}"
