"""The kinds of attacks as a discriminated union: each with its own options. `config.py` documents them."""

from typing import Literal

from atoll.protocol.variants import Choice, Variant


class WithoutOptions(Variant):
    """Attack without options, or no attack."""

    kind: Literal["none", "sign_flip", "inversion", "membership", "lying_coordinator"]


class LabelFlip(Variant):
    """Attack: training on mirrored labels."""

    kind: Literal["label_flip"]
    num_labels: int | None = None


class ScaledFlip(Variant):
    """Attack: the negative update, scaled."""

    kind: Literal["scaled_flip"]
    factor: float | None = None


class Gaussian(Variant):
    """Attack: noise instead of an update."""

    kind: Literal["gaussian"]
    sigma: float | None = None


class LittleIsEnough(Variant):
    """Attack: the mean, shifted within the spread of the honest updates."""

    kind: Literal["alie"]
    z: float | None = None
    knows: str | None = None


class InnerProduct(Variant):
    """Attack: the negative mean."""

    kind: Literal["ipm"]
    epsilon: float | None = None
    knows: str | None = None


class Backdoor(Variant):
    """Attack: training on examples with a trigger."""

    kind: Literal["backdoor"]
    target: int | None = None
    trigger_size: int | None = None
    trigger_value: float | None = None
    poisoned: float | None = None
    factor: float | None = None


class FreeRider(Variant):
    """Attack: an update without training."""

    kind: Literal["free_rider"]
    disguise: str | None = None


AttackKind = WithoutOptions | LabelFlip | ScaledFlip | Gaussian | LittleIsEnough | InnerProduct | Backdoor | FreeRider
ATTACKS: Choice[AttackKind] = Choice(AttackKind, "kind")
