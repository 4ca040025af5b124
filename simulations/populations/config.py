"""The settings of a population: the table `[population]` of a run's TOML."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from atoll.protocol.settings import STRICT

Positive = Annotated[float, Field(gt=0, le=1e9)]

KIND_OPTIONS: Mapping[str, Mapping[str, bool]] = {
    "natural": {},
    "iid": {"clients": True},
    "dirichlet": {"clients": True, "alpha": True, "balanced": False},
    "shards": {"clients": True, "shards_per_client": False},
    "quantity": {"clients": True, "alpha": False, "sigma": False},
    "feature": {"clients": True, "change": True, "strength": False},
}
"""The options of each kind, and whether it must have them; `min_examples` and `seed` are of all."""

NEED_LABELS = ("dirichlet", "shards")
"""The kinds for which each target must be the number of a class."""


class PopulationConfig(BaseModel):
    """Who holds what."""

    model_config = STRICT

    kind: Literal["natural", "iid", "dirichlet", "shards", "quantity", "feature"] = "natural"
    """"natural": the task's own sites, each with its own data. All others pool the sites' data and deal it anew: "iid":
    shuffled, in equal parts. "dirichlet": label skew, each label's shares drawn from a Dirichlet distribution.
    "shards": sorted by label and cut into shards (McMahan et al. 2017). "quantity": shuffled, in unequal parts.
    "feature": as "iid", and what each client sees is changed in its own way."""

    clients: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Of all kinds but "natural": how many clients there are; they are called c0000, c0001, ...; absent: there is none,
    and the kind asks for it."""

    alpha: Positive | None = None
    """Of "dirichlet": the concentration; small values skew more. Of "quantity": the clients' sizes are proportional to
    a Dirichlet distribution with it."""

    balanced: bool = False
    """Of "dirichlet": all clients have equally many examples, and it is each client's mix of labels that is drawn (Hsu
    et al. 2019, where alpha is divided among the labels); otherwise each label's shares of the clients (as NIID-Bench
    has it, Li et al. 2022), and sizes differ."""

    shards_per_client: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Of "shards": how many each client has; absent: 2."""

    sigma: Annotated[float, Field(gt=0, le=10)] | None = None
    """Of "quantity", instead of alpha: the clients' sizes are proportional to exp(sigma z), with z standard normal; at
    10 two clients a standard deviation apart differ 22 000 times, and nearly all examples are those of one."""

    change: Literal["noise", "shift", "rotation"] | None = None
    """Of "feature": "noise": client k of n adds noise with the standard deviation strength k / n (after NIID-Bench).
    "shift": each client scales and shifts its inputs, by exp(strength z) and strength z', as scanners of another
    contrast and brightness do. "rotation": images are turned by 0, 90, 180 or 270 degrees, a quarter of the clients
    each (Ghosh et al. 2020)."""

    strength: Positive | None = None
    """Of the changes "noise" and "shift", in units of the inputs; absent: 0.1."""

    min_examples: int = Field(default=1, ge=1, le=1_000_000_000)
    """No client may have fewer examples to train on."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Decides who holds what; absent: the run's seed."""

    @model_validator(mode="after")
    def _only_what_the_kind_has(self) -> "PopulationConfig":
        options = KIND_OPTIONS[self.kind]
        given = {name for table in KIND_OPTIONS.values() for name in table if getattr(self, name) not in (None, False)}
        faults = []
        if wrong := sorted(given - options.keys()):
            faults.append(f"{', '.join(wrong)} is no option of {self.kind} (allowed: {', '.join(options) or 'none'})")
        if missing := [name for name, must in options.items() if must and name not in given]:
            faults.append(f"{self.kind} needs {', '.join(missing)}")
        if self.kind == "quantity" and (self.alpha is None) == (self.sigma is None):
            faults.append("quantity needs one of alpha and sigma")
        if self.change == "rotation" and self.strength is not None:
            faults.append("strength is no option of the change rotation")
        if faults:
            raise ValueError("; ".join(faults))
        return self
