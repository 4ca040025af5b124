"""The rules, codecs, server optimizers and samplers of a user's own, by an installed package's name or a reference."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from atoll.aggregation.codecs.installed import GROUP, open_for
from atoll.aggregation.codecs.own_object import is_codec
from atoll.protocol.plugins import ExtensionKind
from atoll.protocol.settings import ConfigError
from atoll.server.config.kinds import CODECS, COHORT_SAMPLERS, RULES, SERVER_OPTIMIZERS
from atoll.server.selection.sampling import Sampler

if TYPE_CHECKING:
    from atoll.aggregation.own_optimizer import OwnOptimizer
    from atoll.aggregation.rules.rule import Rule


def callable_or_optimizer(found: object) -> bool:
    """Return whether an object is a server optimizer, or may make one."""
    return callable(found) or callable(getattr(found, "apply", None))


def _codec_faults(found: object) -> list[str]:
    from atoll.aggregation.codecs.contract import faults_without_options

    return faults_without_options(found)


RULE_EXTENSION = ExtensionKind(
    name="rule",
    group="atoll.rules",
    setting="aggregation.rule",
    allowed="an object with a method `reduce`",
    form="object",
    built_in=tuple(RULES.variants),
    fits=lambda found: callable(getattr(found, "reduce", None)) and not isinstance(found, type),
)

OPTIMIZER_EXTENSION = ExtensionKind(
    name="server optimizer",
    group="atoll.optimizers",
    setting="optimizer.name",
    allowed="an object with a method `apply`, or a class or function that makes one of `optimizer.options`",
    form="object",
    built_in=tuple(SERVER_OPTIMIZERS.variants),
    fits=callable_or_optimizer,
)

CODEC_EXTENSION = ExtensionKind(
    name="codec",
    group=GROUP,
    setting="aggregation.codec",
    allowed="an object with the methods `num_bytes`, `encode` and `decode`, or a class or function that makes one of "
    "`aggregation.codec_options`",
    form="",
    built_in=tuple(CODECS.variants),
    fits=lambda found: callable(found) or is_codec(found),
    faults=_codec_faults,
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


def load_rule(name: str) -> "Rule":
    """Return a user's own rule, by the name of a package or by a reference.

    Raises:
        ConfigError: there is no such object, or it has no method `reduce`.
    """
    return cast("Rule", RULE_EXTENSION.load(name))


def load_sampler(name: str) -> Sampler:
    """Return a user's own sampler, by the name of a package or by a reference.

    Raises:
        ConfigError: there is no such function.
    """
    return cast(Sampler, SAMPLER_EXTENSION.load(name))


def load_optimizer(name: str, options: Mapping[str, Any]) -> "OwnOptimizer":
    """Return a user's own server optimizer, by the name of a package or by a reference.

    Args:
        name: of an object, which takes no options, or of a class or function, which is called with them.
        options: by name.

    Raises:
        ConfigError: there is no such object, it refuses the options, or it makes no server optimizer.
    """
    from atoll.aggregation.own_optimizer import OwnOptimizer

    found: Any = OPTIMIZER_EXTENSION.load(name)
    is_made = isinstance(found, type) or not callable(getattr(found, "apply", None))
    if not is_made and options:
        raise ConfigError([f"optimizer.options: {name} is an object and takes none; allowed: a class or a function"])
    try:
        return OwnOptimizer(found(**options) if is_made else found)
    except Exception as error:  # the user's code runs here and may raise anything
        what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ConfigError([f"optimizer: {name}: {what}"]) from error


def open_codec(name: str, options: Mapping[str, Any]) -> None:
    """Open an installed package's codec in this process, and check it against its contract.

    Raises:
        ConfigError: there is no such codec, it does not load, it refuses the options, or it breaks the contract.
    """
    from atoll.aggregation.codecs.contract import codec_faults

    CODEC_EXTENSION.load(name)
    try:
        faults = codec_faults(open_for(name, options))
    except ValueError as fault:
        faults = [str(fault)]
    if faults:
        raise ConfigError([f"aggregation.codec: {name}: {fault}" for fault in faults])
