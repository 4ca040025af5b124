"""The settings that turn a run's updates into the next version: algorithm, rule, norm bound, codec, optimizer."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from atoll.ground.faults import Refused
from atoll.ground.printable import count_of
from atoll.plugins.kind import AS_RECORDED
from atoll.protocol.settings import STRICT, ConfigError, Plain
from atoll.protocol.variants import Given
from atoll.server.config.extensions import (
    CUSTOM_CODEC,
    CUSTOM_OPTIMIZER,
    CUSTOM_RULE,
    open_codec,
)
from atoll.server.config.kinds import CODECS, RULES, SERVER_OPTIMIZERS, make_optimizer, make_rule
from atoll.server.rounds.policy import StragglerPolicy
from atoll.tensors.codecs.installed import name_for
from atoll.tensors.codecs.names import codec_name
from atoll.training.local.algorithms import CONCATENATE

if TYPE_CHECKING:
    from atoll.aggregation.fold.device import Device
    from atoll.aggregation.optimizers import Optimizer
    from atoll.aggregation.rules.rule import Rule

PARTIAL_ACCEPTS = "aggregation.partial = true accepts updates that leave tensors out"
"""Remedy for an update that lacks tensors."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Decay = Annotated[float, Field(ge=0, lt=1)]

APPEND_MAX = 1 << 24
"""Most bytes that one update may append, unless a run sets another number."""

RULE_FIELDS = ("malicious", "num_selected", "num_steps", "radius", "append_max")
"""Options of the rules among the settings of `AggregationConfig`."""


class AggregationConfig(BaseModel, **STRICT):
    """Aggregation of a round's updates."""

    algorithm: Literal["fedavg", "fednova", "scaffold"] = "fedavg"
    """Federated algorithm: "fedavg" (FedSGD and FedProx, too, by `local`); "fednova": each update is divided by its
    number of steps, so that sites with more steps do not pull the model towards themselves; "scaffold": control
    variates, sent beside the model, correct the drift of each site's steps."""

    num_clients: int | None = Field(default=None, ge=1, le=1_000_000)
    """Number of clients in the federation for "scaffold", including clients that are never chosen; absent: refused by
    "scaffold", because there is no default."""

    weighting: Literal["examples", "uniform"] = "examples"
    """Weight of an update in the mean: "examples": its `num_examples`; "uniform": the same for all. The discounts of
    late and of partial updates apply to both."""

    rule: Annotated[str, AfterValidator(CUSTOM_RULE.check)] = "mean"
    """Aggregation rule. "mean": exact, weighted. Robust against arbitrary updates, all with the same weight: "median"
    and "trimmed_mean", element by element; "multi_krum", "geometric_median" and "centered_clipping", by the distances
    of whole updates. "concatenate": no mean, the rows of each update are appended to the model's in the order of the
    clients' names, for models that grow, such as ensembles of trees. Or a custom rule, an object with a method
    `reduce`: by the name that an installed package declares (see `atoll plugins`), or as `module:object` or
    `path/to/file.py:object`."""

    malicious: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=0.5)] | None = None
    """Number of a round's updates that may be arbitrary, for "trimmed_mean", "multi_krum" and `mix_neighbours`: a whole
    number, or a share below 0.5 (rounded down); absent: refused by them, because there is no default."""

    num_selected: Annotated[int, Field(ge=1)] | None = None
    """Number of updates that "multi_krum" averages; absent: all but `malicious`."""

    num_steps: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Iterations of "geometric_median" and "centered_clipping"; absent: 8 and 1."""

    radius: Positive | None = None
    """Radius of "centered_clipping", about the distance of an honest update from the mean; absent: refused by the rule,
    because there is no default."""

    append_max: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Most bytes that one update may append with "concatenate"; a larger one is refused; absent: 16777216 (16 MiB)."""

    mix_neighbours: bool = False
    """Nearest-neighbour mixing before a rule (not "mean"): each update becomes the mean of its nearest updates, all but
    `malicious`. For sites whose data differ."""

    norm_bound: Positive | Literal["median"] | None = None
    """Largest norm of an update; longer ones are scaled down to it: a number, or "median", the median norm of the
    round's updates; absent: no bound. With any rule."""

    partial: bool = False
    """Accept updates that leave tensors out, such as updates of clients that train a part of the model: each tensor is
    averaged over the updates that have it, and stays unchanged if no update has it."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]+)?)$")] = "cpu"
    """Device on which "mean" adds the updates' floats: "cpu", or a GPU, "cuda" or "cuda:1", with the same bits. Each
    aggregation rank uses this device of its own machine."""

    codec: Annotated[str, AfterValidator(CUSTOM_CODEC.check)] = "none"
    """Compression of the updates for the upload; clients without it send plain updates. Size relative to float32:
    "bf16" and "fp16" 1/2, "qsgd8" (8 bits, unbiased random rounding) 0.252, "sign" (1 bit) 1/32, "topk" (only the
    largest elements) 1.5 times `topk_fraction`. With "topk" and "sign" the client adds the rest to its next update
    (error feedback). Integers and buffers stay plain. Or a custom codec, by the name that an installed package declares
    (see `atoll plugins`): on the coordinator's machine and on each agent's, in the same version."""

    topk_fraction: Annotated[float, Field(ge=0.000001, le=1)] | None = None
    """Share of each 65,536 elements that "topk" sends, such as 0.01; rounded to millionths; absent: refused by
    the codec, because there is no default."""

    codec_options: dict[str, Plain] = {}
    """Arguments of a custom codec by name, such as `codec_options.levels = 4`: for a class or a function."""

    @model_validator(mode="after")
    def _algorithm_has_what_it_needs(self) -> "AggregationConfig":
        faults = []
        if self.algorithm != "fedavg" and (self.rule != "mean" or self.norm_bound is not None):
            what = "norm_bound" if self.rule == "mean" else f"rule {self.rule!r}"
            faults.append(f"{self.algorithm} needs the exact mean, and cannot be combined with {what}")
        if self.partial and self.algorithm != "fedavg":
            faults.append(f"{self.algorithm} needs whole updates, and cannot be combined with partial")
        if self.partial and (
            self.mix_neighbours or self.rule in ("multi_krum", "geometric_median", "centered_clipping")
        ):
            faults.append(f"rule {self.rule!r} compares whole updates, and cannot be combined with partial")
        if self.algorithm == "scaffold" and self.num_clients is None:
            faults.append("scaffold needs num_clients")
        if self.algorithm != "scaffold" and self.num_clients is not None:
            faults.append(f"num_clients is not an option of {self.algorithm}")
        if faults:
            raise Refused(*faults)
        return self

    @model_validator(mode="after")
    def _rows_stay_as_they_are(self) -> "AggregationConfig":
        given = {
            "mix_neighbours": self.mix_neighbours,
            f"weighting {self.weighting!r}": self.weighting != "examples",
            "norm_bound": self.norm_bound is not None,
            "partial": self.partial,
            f"codec {self.codec!r}": self.codec != "none",
        }
        if self.grows and (wrong := [name for name, is_given in given.items() if is_given]):
            raise ValueError(
                f"rule concatenate appends the rows of an update unchanged, and cannot be combined with "
                f"{', '.join(wrong)}: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _only_what_the_rule_has(self) -> "AggregationConfig":
        if self.rule != "mean" and self.device != "cpu":
            raise ValueError(f"device {self.device} is for the rule mean, and rule is {self.rule}: allowed is cpu")
        if self.mix_neighbours and self.rule == "mean":
            raise ValueError("mix_neighbours applies before a robust rule, and rule is mean")
        self._rule_options()
        if self.mix_neighbours and self.malicious is None:
            raise ValueError(f"{self.rule} with mix_neighbours needs malicious")
        return self

    @model_validator(mode="after")
    def _only_what_the_codec_has(self) -> "AggregationConfig":
        CODECS.pick(self.codec, {"topk_fraction": self.topk_fraction}, label=f"codec {self.codec}")
        if self._has_built_in_codec and self.codec_options:
            raise ValueError(f"codec_options are for a custom codec, and codec is {self.codec}")
        return self

    def _rule_options(self) -> Given:
        given = {name: getattr(self, name) for name in RULE_FIELDS}
        return RULES.pick(self.rule, given, also={"malicious"} if self.mix_neighbours else frozenset())

    @property
    def has_own_rule(self) -> bool:
        """Whether the rule is a custom one."""
        return self.rule not in RULES.variants

    @property
    def _has_built_in_codec(self) -> bool:
        return self.codec in CODECS.variants

    @property
    def codec_name(self) -> str:
        """Name of the codec in invitations and manifests, such as "topk:0.01"; empty: no codec.

        A package's codec includes the package's version (`installed`), and cannot be resolved before `open_codec`.
        """
        if not self._has_built_in_codec:
            return name_for(self.codec, self.codec_options)
        return "" if self.codec == "none" else codec_name(self.codec, self.topk_fraction)

    def open_codec(self) -> None:
        """Open an installed package's codec in this process; any other needs nothing.

        Raises:
            ConfigError: the codec does not exist here, or breaks its contract.
        """
        if not self._has_built_in_codec:
            open_codec(self.codec, self.codec_options)

    @property
    def grows(self) -> bool:
        """Whether the model grows by the rows of the updates, and is not a mean of models."""
        return self.rule == CONCATENATE

    @property
    def training(self) -> str:
        """Algorithm of the clients, as their invitations name it: with "concatenate" an update has rows."""
        return CONCATENATE if self.grows else self.algorithm

    @property
    def most_appended(self) -> int | None:
        """Largest number of bytes that one update may append; None: the model does not grow."""
        return (self.append_max or APPEND_MAX) if self.grows else None

    def fault_of_rows(self, num_bytes: int) -> str:
        """Return the reason why a run whose model grows refuses an update of this size; empty: it accepts it."""
        if not self.grows or (most := self.most_appended) is None or num_bytes <= most:
            return ""
        return f"the update would append {count_of(num_bytes, 'byte')}; allowed by aggregation.append_max: {most}"

    @property
    def weighs(self) -> bool:
        """Whether updates count by their examples; else all count the same."""
        return self.rule == "mean" and self.weighting == "examples"

    def faults_of_rounds(self, policy: StragglerPolicy) -> Iterator[str]:
        """Yield the faults of a straggler policy that this rule or algorithm cannot support. Loads no user code."""
        if fault := self.fault_of_count(policy.quorum_count):
            yield f"aggregation: a round may end with its quorum, and {fault}"
        if self.grows:
            yield from _faults_of_growth(policy)
        if self.num_clients is None:
            return
        whole = "cannot be combined with scaffold, whose control variates must count whole and at once"
        if policy.is_asynchronous:
            yield f'round: mode {policy.mode!r} {whole}: only "sync" does'
        elif policy.cohort_size > self.num_clients:
            most = f"aggregation.num_clients ({self.num_clients})"
            yield f"round: cohort_size {policy.cohort_size} is more than {most}"
        if policy.late != "discard":
            yield f'round: late {policy.late!r} {whole}: only "discard" does'

    def fault_of_count(self, number: int) -> str:
        """Return why the rule guarantees nothing for so few updates; empty: it does. Loads no user code."""
        if self.has_own_rule or (rule := make_rule(self.rule, self._rule_options())) is None:
            return ""
        from atoll.aggregation.rules.rule import check_count

        try:
            check_count(self._mixed(rule), number)
        except ValueError as fault:
            return str(fault)
        return ""

    def build(self) -> "Rule | None":
        """Make the aggregation rule of these settings; None: the exact weighted mean.

        Raises:
            ConfigError: the custom rule does not exist, or has no method `reduce`.
        """
        rule = CUSTOM_RULE.load(self.rule) if self.has_own_rule else make_rule(self.rule, self._rule_options())
        return None if rule is None else self._mixed(rule)

    def open_device(self) -> "Device | None":
        """Return the device of the sums; None: this process's CPU.

        Raises:
            ConfigError: there is no such device.
        """
        if self.device == "cpu":
            return None
        from atoll.aggregation.fold.device import Device

        try:
            return Device(self.device)
        except ValueError as fault:
            raise ConfigError([f"aggregation: {fault}; allowed here: cpu"]) from None

    def _mixed(self, rule: "Rule") -> "Rule":
        if not self.mix_neighbours:
            return rule
        from atoll.aggregation.rules.geometric import NearestNeighbourMixing

        assert self.malicious is not None
        return NearestNeighbourMixing(self.malicious, rule)


def _faults_of_growth(policy: StragglerPolicy) -> Iterator[str]:
    """Yield the settings of a policy that weigh updates: rows are either appended or not."""
    whole = "cannot be combined with rule concatenate, whose rows have no weight"
    if policy.takes_stale and policy.mode != "fedasync" and policy.staleness != "constant":
        yield f'round: staleness {policy.staleness!r} {whole}: only "constant" does'
    if policy.partial_work == "scaled":
        yield f'round: partial_work "scaled" {whole}: "accept" and "refuse" do'


class OptimizerConfig(BaseModel, **STRICT):
    """Server optimizer: the step of the global model by the mean of a round's updates."""

    name: Annotated[str, AfterValidator(CUSTOM_OPTIMIZER.check)] = "fedavg"
    """Server optimizer. "fedavg": adds the mean. "fedavgm": with momentum. "fedadagrad", "fedadam" and "fedyogi" (Reddi
    et al. 2021): adaptive, element by element. "diloco": Nesterov momentum, lr 0.7 and momentum 0.9. Or a custom
    optimizer, an object with a method `apply` or a class of such objects: by the name that an installed package
    declares (see `atoll plugins`), or as `module:object` or `path/to/file.py:object`."""

    lr: Positive | None = None
    """Learning rate of the server; absent: 1, for the three adaptive optimizers 0.1, for "diloco" 0.7."""

    momentum: Decay | None = None
    """Momentum of "fedavgm" and "diloco", in [0, 1); absent: 0.9."""

    nesterov: bool | None = None
    """Nesterov momentum of "fedavgm"; absent: no. "diloco" always has it."""

    beta1: Decay | None = None
    """Decay of the first moment of the three adaptive optimizers, in [0, 1); absent: 0.9, for "fedadagrad" 0."""

    beta2: Decay | None = None
    """Decay of the second moment of "fedadam" and "fedyogi", in [0, 1); absent: 0.99."""

    tau: Positive | None = None
    """Constant added to the root of the second moment of the three adaptive optimizers; the moment begins at its
    square; absent: 0.001."""

    options: dict[str, Plain] = {}
    """Arguments of a custom optimizer by name, such as `options.alpha = 0.1`: for a class or a function."""

    @model_validator(mode="after")
    def _only_what_it_has(self) -> "OptimizerConfig":
        self._given()
        if not self.is_own and self.options:
            raise ValueError(f"options are for a custom optimizer, and name is {self.name}")
        return self

    @property
    def is_own(self) -> bool:
        """Whether the optimizer is a custom one."""
        return self.name not in SERVER_OPTIMIZERS.variants

    @property
    def scheduled(self) -> Mapping[str, Any]:
        """Numbers that may have a schedule, by name. Loads no user code."""
        if self.is_own:
            return self.options
        own = self.build()
        return {name: getattr(own, name) for name in type(self).model_fields if name != "name" and hasattr(own, name)}

    def with_numbers(self, values: Mapping[str, Any]) -> "OptimizerConfig":
        """Return the settings with new values of the scheduled numbers.

        Raises:
            ValueError: a value is not allowed.
        """
        given = self.model_dump(exclude_none=True)
        changed = {**given, "options": {**self.options, **values}} if self.is_own else {**given, **values}
        return OptimizerConfig.model_validate(changed, context=dict(AS_RECORDED))

    def _given(self) -> Given:
        given = {option: value for option, value in self if option not in ("name", "options")}
        return SERVER_OPTIMIZERS.pick(self.name, given)

    def build(self) -> "Optimizer":
        """Make the server optimizer of these settings.

        Raises:
            ConfigError: the custom one does not exist, or refuses its options.
        """
        own = self.is_own
        return CUSTOM_OPTIMIZER.load(self.name, self.options) if own else make_optimizer(self.name, self._given())
