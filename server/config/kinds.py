"""The kinds of rules, codecs, server optimizers and samplers as discriminated unions: each with its own options.

The tables of a run's TOML stay flat: `aggregation.py` and `run.py` declare and document the options, and pick here.
Settings are read without numpy: a rule and an optimizer are imported when they are built.
"""

from functools import partial
from typing import TYPE_CHECKING, Literal

from atoll.protocol.variants import Choice, Variant
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import SAMPLERS, Sampler, power_of_choice
from atoll.tensors.codecs.names import codec_name

if TYPE_CHECKING:
    from atoll.aggregation.optimizers import Optimizer
    from atoll.aggregation.rules.rule import Rule

# ------------------------------------------------------------ rules


class MeanKind(Variant):
    """Aggregation kind: the exact weighted mean, which needs no rule, because the fold computes it."""

    rule: Literal["mean"]

    def build(self) -> "Rule | None":
        """Return None: the fold itself computes the mean."""
        return None


class MedianKind(Variant):
    """Aggregation rule: the median of each element."""

    rule: Literal["median"]

    def build(self) -> "Rule | None":
        """Make the aggregation rule (coordinate-wise median)."""
        from atoll.aggregation.rules.coordinate import Median

        return Median()


class TrimmedMeanKind(Variant):
    """Aggregation rule: the mean of each element without its extremes."""

    rule: Literal["trimmed_mean"]
    malicious: int | float

    def build(self) -> "Rule | None":
        """Make the aggregation rule (trimmed mean)."""
        from atoll.aggregation.rules.coordinate import TrimmedMean

        return TrimmedMean(self.malicious)


class MultiKrumKind(Variant):
    """Aggregation rule: the mean of the updates with the nearest neighbours."""

    rule: Literal["multi_krum"]
    malicious: int | float
    num_selected: int | None = None

    def build(self) -> "Rule | None":
        """Make the aggregation rule (Multi-Krum)."""
        from atoll.aggregation.rules.geometric import MultiKrum

        return MultiKrum(**self.options("rule"))


class GeometricMedianKind(Variant):
    """Aggregation rule: the point with the smallest sum of distances to the updates."""

    rule: Literal["geometric_median"]
    num_steps: int | None = None

    def build(self) -> "Rule | None":
        """Make the aggregation rule (geometric median)."""
        from atoll.aggregation.rules.geometric import GeometricMedian

        return GeometricMedian(**self.options("rule"))


class CenteredClippingKind(Variant):
    """Aggregation rule: the mean of the updates, clipped to a ball around the last aggregate."""

    rule: Literal["centered_clipping"]
    radius: float
    num_steps: int | None = None

    def build(self) -> "Rule | None":
        """Make the aggregation rule (centered clipping)."""
        from atoll.aggregation.rules.geometric import CenteredClipping

        return CenteredClipping(**self.options("rule"))


class ConcatenateKind(Variant):
    """Aggregation kind: the rows of all updates, appended to the model's."""

    rule: Literal["concatenate"]
    append_max: int = 1 << 24

    def build(self) -> "Rule | None":
        """Return None: nothing is reduced, because rows are appended (`fold.concatenation`)."""
        return None


RuleKind = (
    MeanKind
    | MedianKind
    | TrimmedMeanKind
    | MultiKrumKind
    | GeometricMedianKind
    | CenteredClippingKind
    | ConcatenateKind
)
RULES: Choice[RuleKind] = Choice(RuleKind, "rule")

# ------------------------------------------------------------ codecs


class PlainKind(Variant):
    """Codec kind: none, updates are sent plain."""

    codec: Literal["none"]

    @property
    def name(self) -> str:
        """The name in invitations and manifests: empty."""
        return ""


class FamilyKind(Variant):
    """Codec kind without options."""

    codec: Literal["bf16", "fp16", "qsgd8", "sign"]

    @property
    def name(self) -> str:
        """The name in invitations and manifests."""
        return codec_name(self.codec, None)


class TopKKind(Variant):
    """Codec kind: only the largest elements of each chunk are sent."""

    codec: Literal["topk"]
    topk_fraction: float

    @property
    def name(self) -> str:
        """The name in invitations and manifests, such as "topk:0.01"."""
        return codec_name(self.codec, self.topk_fraction)


CodecKind = PlainKind | FamilyKind | TopKKind
CODECS: Choice[CodecKind] = Choice(CodecKind, "codec")

# ------------------------------------------------------------ server optimizers


class ServerOptimizer(Variant):
    """Server optimizer; options that are not given have the defaults of its class in `aggregation.optimizers`."""

    name: str
    lr: float | None = None

    def build(self) -> "Optimizer":
        """Make the server optimizer with the given options."""
        from atoll.aggregation.optimizers import OPTIMIZERS

        optimizer: Optimizer = OPTIMIZERS[self.name](**self.options("name"))
        return optimizer


class FedAvgKind(ServerOptimizer):
    """Server optimizer: the mean, times a learning rate."""

    name: Literal["fedavg"]


class FedAvgMKind(ServerOptimizer):
    """Server optimizer: the mean with momentum."""

    name: Literal["fedavgm"]
    momentum: float | None = None
    nesterov: bool | None = None


class FedAdagradKind(ServerOptimizer):
    """Server optimizer: an adaptive step by the sum of the squares."""

    name: Literal["fedadagrad"]
    beta1: float | None = None
    tau: float | None = None


class FedAdamKind(ServerOptimizer):
    """Server optimizer: an adaptive step by a moving average of the squares."""

    name: Literal["fedadam", "fedyogi"]
    beta1: float | None = None
    beta2: float | None = None
    tau: float | None = None


class DiLoCoKind(ServerOptimizer):
    """Server optimizer: Nesterov momentum with the settings of DiLoCo."""

    name: Literal["diloco"]
    momentum: float | None = None


OptimizerKind = FedAvgKind | FedAvgMKind | FedAdagradKind | FedAdamKind | DiLoCoKind
SERVER_OPTIMIZERS: Choice[OptimizerKind] = Choice(OptimizerKind, "name")

# ------------------------------------------------------------ samplers


class PlainSampler(Variant):
    """Client sampler without options."""

    sampler: Literal["uniform", "weighted", "stratified"]

    def build(self) -> Sampler | Oort:
        """Make the client sampler."""
        return SAMPLERS[self.sampler]


class PowerOfChoiceKind(Variant):
    """Client sampler: the largest losses among some drawn clients."""

    sampler: Literal["power_of_choice"]
    candidates: int

    def build(self) -> Sampler | Oort:
        """Make the client sampler (power of choice)."""
        return partial(power_of_choice, num_considered=self.candidates)


class OortKind(Variant):
    """Client sampler: the clients with a high utility and short round times."""

    sampler: Literal["oort"]
    exploration: float | None = None
    exploration_decay: float | None = None
    exploration_min: float | None = None
    penalty: float | None = None
    patience: float | None = None
    patience_step: float | None = None
    pacer_window: int | None = None

    def build(self) -> Sampler | Oort:
        """Make the client sampler (Oort); the pacer's window belongs to the ledger of the run, not to the sampler."""
        return Oort(**self.options("sampler", "pacer_window"))


SamplerKind = PlainSampler | PowerOfChoiceKind | OortKind
COHORT_SAMPLERS: Choice[SamplerKind] = Choice(SamplerKind, "sampler")
