"""The settings of a population: the table `[population]` of a run's TOML."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from atoll.protocol.settings import STRICT, Plain
from atoll.simulations.populations.kinds import CUSTOM_POPULATION, POPULATIONS

Positive = Annotated[float, Field(gt=0, le=1e9)]


class PopulationConfig(BaseModel, **STRICT):
    """Population: its clients and the rule by which examples are dealt to them."""

    kind: Annotated[str, AfterValidator(CUSTOM_POPULATION.check)] = "natural"
    """Partition of the data among the clients. "natural": the task's sites, each with its data. All other kinds pool
    the sites' data and split it among the clients: "iid": shuffled, in equal parts. "dirichlet": label skew, each
    label's shares drawn from a Dirichlet distribution. "shards": sorted by label and cut into shards (McMahan et al.
    2017). "quantity": shuffled, in unequal parts. "feature": as "iid", with a different change of the inputs at each
    client. Or a custom function of (examples, clients, rng): by the name that an installed package declares (see
    `atoll plugins`), or as `module:function` or `path/to/file.py:function`."""

    clients: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Number of clients, named c0000, c0001, ...; required by all kinds but "natural", which does not have it."""

    options: dict[str, Plain] = {}
    """Values for a custom `kind`, passed by name: `options.spread = 0.5`."""

    alpha: Positive | None = None
    """Concentration of the Dirichlet distribution from which "dirichlet" draws each label's shares, and "quantity" the
    clients' sizes; smaller values skew more."""

    balanced: bool = False
    """Equal sizes for "dirichlet": the mix of labels of each client is drawn (Hsu et al. 2019; alpha is divided among
    the labels). False: the clients' shares of each label are drawn (NIID-Bench, Li et al. 2022), and sizes differ."""

    shards_per_client: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Shards per client for "shards"; absent: 2."""

    sigma: Annotated[float, Field(gt=0, le=10)] | None = None
    """Spread of the sizes for "quantity", in place of alpha: they are proportional to exp(sigma z), with z standard
    normal. At 10, sizes a standard deviation apart differ by a factor of 22 000, and one client has nearly all
    examples."""

    change: Literal["noise", "shift", "rotation"] | None = None
    """Change of the inputs for "feature". "noise": client k of n adds noise with the standard deviation strength k / n
    (after NIID-Bench). "shift": each client scales its inputs by exp(strength z) and shifts them by strength z', as
    scanners with another contrast and brightness do. "rotation": images are turned by 0, 90, 180 or 270 degrees, a
    quarter of the clients each (Ghosh et al. 2020)."""

    strength: Positive | None = None
    """Strength of the changes "noise" and "shift", in units of the inputs; absent: 0.1."""

    min_examples: int = Field(default=1, ge=1, le=1_000_000_000)
    """Minimum number of training examples of every client; a split with fewer is refused."""

    drop_empty: bool = False
    """Leave out clients without any training example: sites of the task for "natural", clients of a "dirichlet" or
    custom split. The others keep their names and their draws. False: such a client is refused."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the partition; absent: the run's seed."""

    @model_validator(mode="after")
    def _only_what_the_kind_has(self) -> "PopulationConfig":
        given = {name: value for name, value in self if name not in ("kind", "min_examples", "drop_empty", "seed")}
        given |= {"balanced": self.balanced or None, "options": self.options or None}
        if self.is_ours:
            POPULATIONS.pick(self.kind, given)
            return self
        POPULATIONS.pick(self.kind, given, also={"clients", "options"})
        if self.clients is None:
            raise ValueError(f"{self.kind} needs clients")
        return self

    @property
    def is_ours(self) -> bool:
        """Return whether the kind is a built-in one."""
        return self.kind in POPULATIONS.variants
