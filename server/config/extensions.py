"""The rules and the samplers of a user's own: the name of an installed package's entry point, or a reference."""

from typing import cast

from atoll.aggregation.rules.rule import Rule
from atoll.protocol.plugins import ExtensionKind
from atoll.server.config.kinds import COHORT_SAMPLERS, RULES
from atoll.server.selection.sampling import Sampler

RULE_EXTENSION = ExtensionKind(
    name="rule",
    group="atoll.rules",
    setting="aggregation.rule",
    allowed="an object with a method `reduce`",
    form="object",
    built_in=tuple(RULES.variants),
    fits=lambda found: callable(getattr(found, "reduce", None)) and not isinstance(found, type),
)

SAMPLER_EXTENSION = ExtensionKind(
    name="sampler",
    group="atoll.samplers",
    setting="cohort.sampler",
    allowed="a function of (candidates, count, rng)",
    form="function",
    built_in=tuple(COHORT_SAMPLERS.variants),
    fits=callable,
)


def load_rule(name: str) -> Rule:
    """Return a user's own rule, by the name of a package or by a reference.

    Raises:
        ConfigError: there is no such object, or it has no method `reduce`.
    """
    return cast(Rule, RULE_EXTENSION.load(name))


def load_sampler(name: str) -> Sampler:
    """Return a user's own sampler, by the name of a package or by a reference.

    Raises:
        ConfigError: there is no such function.
    """
    return cast(Sampler, SAMPLER_EXTENSION.load(name))
