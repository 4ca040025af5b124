"""The built-in rules, codecs, server optimizers and samplers of a run, each with its own options.

The tables of a run's TOML stay flat: `aggregation.py` and `run.py` declare and document the options, and pick here.
Settings are read without numpy: a rule and an optimizer are imported when they are built.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from atoll.protocol.variants import Choice, Variant
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import SAMPLERS, Sampler, power_of_choice

if TYPE_CHECKING:
    from atoll.aggregation.optimizers import Optimizer
    from atoll.aggregation.rules.rule import Rule

RULES = Choice(
    {
        "mean": Variant(),
        "median": Variant(),
        "trimmed_mean": Variant("malicious"),
        "multi_krum": Variant("malicious", others=("num_selected",)),
        "geometric_median": Variant(others=("num_steps",)),
        "centered_clipping": Variant("radius", others=("num_steps",)),
        "concatenate": Variant(others=("append_max",)),
    }
)

CODECS = Choice(
    {**dict.fromkeys(("none", "bf16", "fp16", "qsgd8", "sign"), Variant()), "topk": Variant("topk_fraction")}
)

SERVER_OPTIMIZERS = Choice(
    {
        "fedavg": Variant(others=("lr",)),
        "fedavgm": Variant(others=("lr", "momentum", "nesterov")),
        "fedadagrad": Variant(others=("lr", "beta1", "tau")),
        **dict.fromkeys(("fedadam", "fedyogi"), Variant(others=("lr", "beta1", "beta2", "tau"))),
        "diloco": Variant(others=("lr", "momentum")),
    }
)

_OORT = ("exploration", "exploration_decay", "exploration_min", "penalty", "patience", "patience_step")
COHORT_SAMPLERS = Choice(
    {
        **dict.fromkeys(("uniform", "weighted", "stratified"), Variant()),
        "power_of_choice": Variant("candidates"),
        "oort": Variant(others=(*_OORT, "pacer_window")),
    }
)


def make_rule(name: str, options: Mapping[str, Any]) -> "Rule | None":
    """Make a built-in aggregation rule; None: the fold computes the mean, and appends rows, without one."""
    if name in ("mean", "concatenate"):
        return None
    from atoll.aggregation.rules import coordinate, geometric

    rules: dict[str, Any] = {
        "median": coordinate.Median,
        "trimmed_mean": coordinate.TrimmedMean,
        "multi_krum": geometric.MultiKrum,
        "geometric_median": geometric.GeometricMedian,
        "centered_clipping": geometric.CenteredClipping,
    }
    rule: Rule = rules[name](**options)
    return rule


def make_optimizer(name: str, options: Mapping[str, Any]) -> "Optimizer":
    """Make a built-in server optimizer; options that are not given have the defaults of its class."""
    from atoll.aggregation.optimizers import OPTIMIZERS

    optimizer: Optimizer = OPTIMIZERS[name](**options)
    return optimizer


def make_sampler(name: str, options: Mapping[str, Any]) -> Sampler | Oort:
    """Make a built-in sampler of cohorts; the pacer's window belongs to the ledger of the run, not to the sampler."""
    if name == "oort":
        return Oort(**{key: value for key, value in options.items() if key in _OORT})
    if name == "power_of_choice":
        return partial(power_of_choice, num_considered=options["candidates"])
    return SAMPLERS[name]
