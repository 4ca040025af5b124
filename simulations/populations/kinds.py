"""The kinds of populations, each with its own options. `config.py` documents them."""

from atoll.plugins.kind import Kind
from atoll.protocol.settings import ConfigError
from atoll.protocol.variants import Choice, Given, Variant


def _fault_of_quantity(given: Given) -> str:
    return "quantity needs one of alpha and sigma" if ("alpha" in given) == ("sigma" in given) else ""


def _fault_of_feature(given: Given) -> str:
    is_wrong = given["change"] == "rotation" and "strength" in given
    return "strength is not an option of the change rotation" if is_wrong else ""


POPULATIONS = Choice(
    {
        "natural": Variant(),
        "iid": Variant("clients"),
        "dirichlet": Variant("clients", "alpha", others=("balanced",)),
        "shards": Variant("clients", others=("shards_per_client",)),
        "quantity": Variant("clients", others=("alpha", "sigma"), fault=_fault_of_quantity),
        "feature": Variant("clients", "change", others=("strength",), fault=_fault_of_feature),
    }
)
CUSTOM_POPULATION = Kind(
    name="population",
    group="atoll.populations",
    setting="population.kind",
    allowed="a function of (examples, clients, rng)",
    failed=ConfigError,
    form="function",
    built_in=tuple(POPULATIONS.variants),
)
NEED_LABELS = ("dirichlet", "shards")
"""Kinds that need a class number as each target."""
