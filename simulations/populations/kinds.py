"""The kinds of populations as a discriminated union: each with its own options. `config.py` documents them."""

from typing import Literal

from pydantic import model_validator

from atoll.plugins.kind import Kind
from atoll.protocol.settings import ConfigError
from atoll.protocol.variants import Choice, Variant


class Natural(Variant):
    """The task's sites."""

    kind: Literal["natural"]


class Iid(Variant):
    """Shuffled, in equal parts."""

    kind: Literal["iid"]
    clients: int


class Dirichlet(Variant):
    """Label skew by a Dirichlet distribution."""

    kind: Literal["dirichlet"]
    clients: int
    alpha: float
    balanced: bool | None = None


class Shards(Variant):
    """Sorted by label and cut into shards."""

    kind: Literal["shards"]
    clients: int
    shards_per_client: int | None = None


class Quantity(Variant):
    """Shuffled, in unequal parts."""

    kind: Literal["quantity"]
    clients: int
    alpha: float | None = None
    sigma: float | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "Quantity":
        if (self.alpha is None) == (self.sigma is None):
            raise ValueError("quantity needs one of alpha and sigma")
        return self


class Feature(Variant):
    """Equal parts, with inputs that are changed differently for each client."""

    kind: Literal["feature"]
    clients: int
    change: str
    strength: float | None = None

    @model_validator(mode="after")
    def _a_rotation_has_no_strength(self) -> "Feature":
        if self.change == "rotation" and self.strength is not None:
            raise ValueError("strength is not an option of the change rotation")
        return self


PopulationKind = Natural | Iid | Dirichlet | Shards | Quantity | Feature
POPULATIONS: Choice[PopulationKind] = Choice(PopulationKind, "kind")
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
