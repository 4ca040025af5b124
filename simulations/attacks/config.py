"""The settings of an attack, the table `[attack]` of a run's TOML: kind, malicious clients, strength."""

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, Field, model_validator

from atoll.protocol.settings import STRICT
from atoll.protocol.variants import Choice, Variant

OF_ALL = ("kind", "malicious", "keeps_bound")
"""Fields that belong to every kind of attack."""

OfClients = Literal[
    "none", "label_flip", "sign_flip", "scaled_flip", "gaussian", "alie", "ipm", "backdoor", "free_rider"
]
Inference = Literal["inversion", "membership"]
Kind = OfClients | Inference | Literal["lying_coordinator"]
OF_COORDINATOR = frozenset({*get_args(Inference), "lying_coordinator"})
"""Names of the attacks of the coordinator, which no client takes part in."""
ATTACKS = Choice(
    {
        **dict.fromkeys(("none", "sign_flip", *sorted(OF_COORDINATOR)), Variant()),
        "label_flip": Variant(others=("num_labels",)),
        "scaled_flip": Variant(others=("factor",)),
        "gaussian": Variant(others=("sigma",)),
        "alie": Variant(others=("z", "knows")),
        "ipm": Variant(others=("epsilon", "knows")),
        "backdoor": Variant(others=("target", "trigger_size", "trigger_value", "poisoned", "factor")),
        "free_rider": Variant(others=("disguise",)),
    }
)
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class AttackConfig(BaseModel, **STRICT):
    """An attack on a run: its kind, the malicious clients and the options of the kind."""

    kind: Kind = "none"
    """Attack of the malicious clients; "none": no attack. Attacks on training data: "label_flip" mirrors the labels,
    "backdoor" adds a trigger with a label of its choice. Attacks on updates: "sign_flip" sends the negative update,
    "scaled_flip" ten times that, "gaussian" noise, "alie" the mean shifted within the spread of the honest updates,
    "ipm" the negative mean, "free_rider" an update without training. Attacks of the coordinator: "inversion" computes
    an input from what each client sends, "membership" tells its examples from others', "lying_coordinator" lies to a
    member of each secure sum."""

    malicious: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] = 0.2
    """Number of malicious clients, drawn by the run's seed: a whole number, or a share of all clients, rounded down."""

    keeps_bound: bool = False
    """In a run with `[secure]`: whether malicious clients clip the updates that they forge to `secure.clip_norm`, as
    honest ones do. Attacks on training data always do, and without `[secure]` nothing is clipped at a client."""

    num_labels: Annotated[int, Field(ge=2)] | None = None
    """Number of labels for "label_flip"; absent: one more than the largest in the malicious clients' and the server's
    data."""

    factor: Positive | None = None
    """Factor by which the update is multiplied; "scaled_flip" also negates it. Absent: 10 for "scaled_flip"; for
    "backdoor" the clients per malicious client of the round, so that the mean becomes their model."""

    sigma: Positive | None = None
    """Standard deviation of "gaussian"; absent: 1."""

    z: Finite | None = None
    """Shift of the mean for "alie", in standard deviations; absent: the value of the paper's formula for the round."""

    epsilon: Positive | None = None
    """Factor of the negated mean that "ipm" sends; absent: 2."""

    knows: Literal["own", "all"] | None = None
    """Honest updates that the adversary of "alie" and "ipm" knows: "own" (of the malicious clients) or "all"; absent:
    "own" for "alie" and "all" for "ipm", as in their papers."""

    target: Annotated[int, Field(ge=0)] | None = None
    """Label that the trigger of "backdoor" causes, one of the labels in the data; absent: 0."""

    trigger_size: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Side of the trigger of "backdoor" in elements: a square patch in the last corner of an image, or the end of a
    flat input; absent: 2."""

    trigger_value: Finite | None = None
    """Value of the elements of the trigger of "backdoor"; absent: 1."""

    poisoned: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a malicious client's examples that get the trigger of "backdoor"; absent: 0.5."""

    disguise: Literal["none", "step", "noise"] | None = None
    """Update of a "free_rider": "none" sends zeros, "step" repeats the last global step, "noise" sends Gaussian noise
    as large as that step; absent: "step"."""

    @model_validator(mode="after")
    def _only_what_the_attack_has(self) -> "AttackConfig":
        ATTACKS.pick(self.kind, {name: value for name, value in self if name not in OF_ALL})
        changed = [name for name in OF_ALL[1:] if getattr(self, name) != type(self).model_fields[name].default]
        if self.kind in OF_COORDINATOR and changed:
            raise ValueError(
                f"{', '.join(changed)} is not an option of {self.kind} (allowed: none): the coordinator attacks, not "
                "its clients"
            )
        return self
