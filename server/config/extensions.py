"""The custom rules, codecs, server optimizers and samplers that a run may name."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atoll.plugins.kind import Kind
from atoll.protocol.settings import ConfigError
from atoll.server.config.kinds import CODECS, COHORT_SAMPLERS, RULES, SERVER_OPTIMIZERS
from atoll.tensors.codecs.installed import CODEC, open_for

CUSTOM_RULE = Kind(
    name="rule",
    group="atoll.rules",
    setting="aggregation.rule",
    allowed="an object with a method `reduce`",
    failed=ConfigError,
    form="object",
    built_in=tuple(RULES.variants),
    methods=("reduce",),
    contract="atoll.aggregation.rules.custom_rule:CustomRule",
)

CUSTOM_OPTIMIZER = Kind(
    name="server optimizer",
    group="atoll.optimizers",
    setting="optimizer.name",
    allowed="an object with a method `apply`",
    failed=ConfigError,
    form="object",
    built_in=tuple(SERVER_OPTIMIZERS.variants),
    methods=("apply",),
    options="optimizer.options",
    contract="atoll.aggregation.custom_optimizer:CustomOptimizer",
)

CUSTOM_CODEC = replace(CODEC, failed=ConfigError, built_in=tuple(CODECS.variants))

CUSTOM_SAMPLER = Kind(
    name="sampler",
    group="atoll.samplers",
    setting="cohort.sampler",
    allowed="a function of (candidates, count, rng)",
    failed=ConfigError,
    form="function",
    built_in=tuple(COHORT_SAMPLERS.variants),
)


def open_codec(name: str, options: Mapping[str, Any]) -> None:
    """Open an installed package's codec in this process, and check it against its contract.

    Raises:
        ConfigError: there is no such codec, it does not load, it refuses the options, or it breaks the contract.
    """
    from atoll.tensors.codecs.contract import codec_faults

    CUSTOM_CODEC.find(name)
    try:
        faults = codec_faults(open_for(name, options))
    except ValueError as fault:
        faults = [str(fault)]
    if faults:
        raise ConfigError([f"aggregation.codec: {name}: {fault}" for fault in faults])
