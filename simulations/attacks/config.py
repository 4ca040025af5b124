"""The settings of an attack: who is malicious, what they do, and how strongly. The table [attack] of a run's TOML."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from atoll.protocol.settings import STRICT

Kind = Literal["none", "label_flip", "sign_flip", "scaled_flip", "gaussian", "alie", "ipm", "backdoor", "free_rider"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]

OPTIONS: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "label_flip": frozenset({"num_labels"}),
    "sign_flip": frozenset(),
    "scaled_flip": frozenset({"factor"}),
    "gaussian": frozenset({"sigma"}),
    "alie": frozenset({"z", "knows"}),
    "ipm": frozenset({"epsilon", "knows"}),
    "backdoor": frozenset({"target", "trigger_size", "trigger_value", "poisoned", "factor"}),
    "free_rider": frozenset({"disguise"}),
}
"""The options of each attack."""


class AttackConfig(BaseModel):
    """Who is malicious, and what they do."""

    model_config = STRICT

    kind: Kind = "none"
    """"none". Of data: "label_flip" trains on mirrored labels, "backdoor" on a trigger with a label of its choice. Of
    updates: "sign_flip" sends the negative, "scaled_flip" ten times that, "gaussian" noise, "alie" the mean moved by as
    much as nobody notices, "ipm" the negative mean, "free_rider" what looks like work."""

    malicious: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] = 0.2
    """How many of the clients are malicious, drawn by the run's seed: a whole number, or a share, rounded down."""

    num_labels: Annotated[int, Field(ge=2)] | None = None
    """Of "label_flip": how many labels there are; absent: one more than the largest in the malicious clients' and the
    server's data."""

    factor: Positive | None = None
    """Of "scaled_flip": how many times the update is sent, negated; absent: 10. Of "backdoor": how many times it is
    sent; absent: clients per malicious client of the round, so that the mean becomes their model."""

    sigma: Positive | None = None
    """Of "gaussian": the standard deviation; absent: 1."""

    z: Finite | None = None
    """Of "alie": by how many standard deviations the mean is moved; absent: what the paper's formula gives for the
    round."""

    epsilon: Positive | None = None
    """Of "ipm": how many times the mean is sent, negated; absent: 2."""

    knows: Literal["own", "all"] | None = None
    """Of "alie" and "ipm": whose honest updates the adversary knows: those of the malicious clients, or all; absent:
    "own" for "alie" and "all" for "ipm", as in their papers."""

    target: Annotated[int, Field(ge=0)] | None = None
    """Of "backdoor": the label that the trigger is to cause, one that somebody has; absent: 0."""

    trigger_size: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Of "backdoor": places on each side of the patch in the last corner of an image, or at the end of a flat input;
    absent: 2."""

    trigger_value: Finite | None = None
    """Of "backdoor": what the patch is set to; absent: 1."""

    poisoned: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of "backdoor": the share of a malicious client's examples that get the trigger; absent: 0.5."""

    disguise: Literal["none", "step", "noise"] | None = None
    """Of "free_rider": "none" sends zeros; "step" the last global step again; "noise" Gaussian noise as large as that
    step; absent: "step"."""

    @model_validator(mode="after")
    def _only_what_the_attack_has(self) -> "AttackConfig":
        strength = set().union(*OPTIONS.values())
        given = {name for name in strength if getattr(self, name) is not None}
        if wrong := sorted(given - OPTIONS[self.kind]):
            allowed = ", ".join(sorted(OPTIONS[self.kind])) or "none"
            raise ValueError(f"{', '.join(wrong)} is no option of {self.kind} (allowed: {allowed})")
        return self
