"""`atoll plugins`: list the extensions that installed packages declare."""

from atoll.cli import options
from atoll.cli.printing import as_json, say, table


def plugins(json: options.Json = False) -> None:
    """List the rules, samplers and other extensions that installed packages declare, with those that cannot be used.

    A package declares them in its entry points. A setting takes the name of one as it takes a built-in name.
    """
    from atoll.parallel.task.local import LOCAL_OPTIMIZERS, OPTIMIZERS
    from atoll.protocol.plugins import ExtensionKind, listed
    from atoll.server.config.extensions import (
        CODEC_EXTENSION,
        OPTIMIZER_EXTENSION,
        RULE_EXTENSION,
        SAMPLER_EXTENSION,
    )
    from atoll.simulations.devices.own_model import DEVICE_EXTENSION
    from atoll.simulations.populations.kinds import POPULATION_EXTENSION

    local_optimizers = ExtensionKind(
        name="local optimizer",
        group=LOCAL_OPTIMIZERS,
        setting="local.optimizer",
        allowed="a class or function of (parameters, lr)",
        form="",
        built_in=OPTIMIZERS,
        fits=callable,
    )
    kinds = (
        RULE_EXTENSION,
        CODEC_EXTENSION,
        OPTIMIZER_EXTENSION,
        local_optimizers,
        SAMPLER_EXTENSION,
        POPULATION_EXTENSION,
        DEVICE_EXTENSION,
    )
    found = listed(kinds)
    if json:
        as_json(found)
        return
    columns = ("kind", "name", "package", "version", "object")
    rows = [(each.kind, each.name, each.package, each.version, each.object) for each in found]
    groups = ", ".join(kind.group for kind in kinds)
    table(columns, rows, empty=f"no installed package declares an extension; the groups of entry points are {groups}")
    if faults := [each for each in found if each.fault]:
        say("")
        for each in faults:
            say(f"cannot be used: {each.kind} {each.name} of {each.package} {each.version}: {each.fault}")
