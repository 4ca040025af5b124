"""`atoll plugins`: list the extensions that installed packages declare."""

from atoll.cli import options
from atoll.cli.printing import as_json, say, table


def plugins(json: options.Json = False) -> None:
    """List the rules, samplers and other extensions that installed packages declare, with those that cannot be used.

    A package declares them in its entry points. A setting takes the name of one as it takes a built-in name.
    """
    from atoll.plugins.kind import listed
    from atoll.server.config.extensions import CUSTOM_CODEC, CUSTOM_OPTIMIZER, CUSTOM_RULE, CUSTOM_SAMPLER
    from atoll.simulations.devices.custom_model import CUSTOM_DEVICE
    from atoll.simulations.populations.kinds import CUSTOM_POPULATION
    from atoll.task.local import LOCAL_OPTIMIZER

    kinds = (
        *(CUSTOM_RULE, CUSTOM_CODEC, CUSTOM_OPTIMIZER, LOCAL_OPTIMIZER),
        *(CUSTOM_SAMPLER, CUSTOM_POPULATION, CUSTOM_DEVICE),
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
