"""The change of a run's settings at its resumption, and the comparison of the settings of two runs."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from atoll.ground.printable import count_of
from atoll.protocol.settings import ConfigError, effective, load_text
from atoll.server.config.run import RunConfig

OF_THE_HOST = ("coordinator", "notify")
"""Tables of a run's TOML that belong to the coordinator."""

CHANGEABLE = (
    "rounds",
    "pause",
    "round",
    "wait",
    "cohort",
    "secure",
    "privacy",
    "local",
    "schedule",
    "evaluation",
    "model",
    "stop",
    "options",
)
"""Keys and tables that a resumed run may change; all others belong to its model or its name."""

ONE_FROM_THE_BEGINNING = (
    "round.mode",
    "round.buffer_size",
    "round.alpha",
    "model.start",
    "model.strict",
    "model.frozen",
    "secure",
    "secure.bits",
    "secure.clip_norm",
    "secure.examples_max",
    "secure.threshold",
    "secure.session_max",
    "secure.metrics",
    "privacy",
    "privacy.unit",
    "privacy.delta",
    "privacy.noise_multiplier",
    "privacy.clip_norm",
    "privacy.clip",
    "privacy.clip_quantile",
    "privacy.clip_learning_rate",
    "privacy.clip_sigma",
    "privacy.mechanism",
    "privacy.separation_min",
    "privacy.bands",
    "privacy.sample_rate",
    "privacy.batch",
    "privacy.noise_by",
    "privacy.honest_min",
    "privacy.colluders",
)
"""Tables and settings that determine the state of a run, or that its sites have approved."""


def changed(config: RunConfig, overrides: Sequence[str], *, version: int) -> RunConfig:
    """Return the changed settings with which a run continues from a version.

    Args:
        config: the previous settings of the run.
        overrides: `key=value`, as for `--set`.
        version: the newest version of the run's model.

    Raises:
        ConfigError: a value is not allowed, a key cannot change, or no round would follow.
    """
    text, foreign = effective(config), settings_of_the_host(overrides)
    overrides = [override for override in overrides if _table_of(override) not in OF_THE_HOST]
    try:
        new = load_text(RunConfig, text, overrides, name="the run")
    except ConfigError as error:  # the other changes are judged, too: all faults at once
        raise ConfigError([*error.faults, *_faults_of_others(config, overrides, version), *foreign]) from error
    if faults := [*_faults(config, new, version), *foreign]:
        raise ConfigError(faults)
    return new


def settings_of_the_host(overrides: Sequence[str]) -> list[str]:
    """List overrides of `coordinator.*` and `notify.*`, which cannot change a running coordinator, as faults.

    A TOML file may have the tables, because it also serves `atoll coordinator`.
    """
    return [
        f"--set: {override.partition('=')[0].strip()}: is a setting of the coordinator, which is running already: pass "
        "it to `atoll coordinator`; --state selects the coordinator"
        for override in overrides
        if _table_of(override) in OF_THE_HOST
    ]


def _table_of(override: str) -> str:
    return override.partition("=")[0].partition(".")[0].strip()


def _faults_of_others(config: RunConfig, overrides: Sequence[str], version: int) -> list[str]:
    """List the faults of the changes whose values are allowed; empty if the values contradict each other."""
    text, sound = effective(config), list[str]()
    for override in overrides:
        with suppress(ConfigError):
            load_text(RunConfig, text, [override], name="the run")
            sound.append(override)
    wrong_keys = {override.partition("=")[0].strip() for override in overrides if override not in sound}
    try:
        new = load_text(RunConfig, text, sound, name="the run")
    except ConfigError:
        return []
    kept = new.model_copy(update={"rounds": version + 1}) if "rounds" in wrong_keys else new  # it is reported already
    return [*_faults(config, kept, version)]


def _faults(old: RunConfig, new: RunConfig, version: int) -> Iterator[str]:
    for key in differing_keys(old, new):
        fixed = _fixed(key)
        if fixed or key.partition(".")[0] not in CHANGEABLE:
            allowed = ", ".join("task's options" if table == "options" else table for table in CHANGEABLE)
            name = _as_set(fixed or key)
            yield f"--set: {name}: fixed for the life of a run; allowed: {allowed}; a new run may have another {name}"
    if old.privacy is not None and old.privacy.is_correlated and new.privacy is not None:
        for name, one, other in (
            ("rounds", old.rounds, new.rounds),
            ("privacy.participations_max", old.privacy.participations_max, new.privacy.participations_max),
        ):
            if one != other:
                yield f"--set: {name}: got {other}, and correlated noise is computed for {one}; allowed: that"
    yield from _faults_of_costs(old, new)
    if new.rounds <= version:
        committed = count_of(version, "version is", "versions are")
        got = f"is {new.rounds}, and" if new.rounds == old.rounds else f"got {new.rounds};"
        yield f"--set: rounds: {got} {committed} committed already; allowed: integer > {version}, as --rounds, too"
    place = new.cohort.sampler.rpartition(":")[0]
    if new.cohort.sampler != old.cohort.sampler and place.endswith(".py") and not os.path.isabs(place):
        yield f"--set: cohort.sampler: {place} is relative; allowed: an absolute path on the coordinator's machine"


def _faults_of_costs(old: RunConfig, new: RunConfig) -> Iterator[str]:
    """Yield the changes with which a charge would be too small.

    A round may not cost a client more than before: a backup of before charges the rounds after it by its settings.
    """
    before, after = _steps(old), _steps(new)
    if before != after and before and after and (old.round.is_asynchronous or after > before):
        got, allowed = f"got {count_of(after, 'step')} in a training, and", count_of(before, "step")
        why = f"a restored backup would charge {before}" if after > before else ""
        why = why or f"an update of {before} may be under way, charged as it comes"
        more = "" if old.round.is_asynchronous else " or fewer"
        yield f"--set: local: {got} {why}; allowed: {allowed}{more}, or another run"
    most, wanted = _charges(old), _charges(new)
    if wanted > most > 0:
        got = f"got {wanted}, and each is charged, of which a restored backup would charge {most}"
        yield f"--set: secure.attempts: {got}; allowed: {most} or fewer, or another run"


def _steps(config: RunConfig) -> int:
    """Return the most steps of a training with a guarantee for examples; 0: there is none."""
    return 0 if (terms := config.example_terms) is None else terms.steps


def _charges(config: RunConfig) -> int:
    """Return the most charges of a client in a round with secure sums; 0: there are none, or no privacy."""
    return 0 if config.privacy is None or config.secure is None else config.rules.charges_max


def _fixed(key: str) -> str:
    """Return the fixed setting that a key is, or is an entry of; empty: it may change."""
    return next((one for one in ONE_FROM_THE_BEGINNING if key == one or ("." in one and key.startswith(f"{one}."))), "")


def with_number_of_versions(config: RunConfig, keep_versions: int) -> RunConfig:
    """Return the settings of a run with the number of versions to keep, unless they already name one.

    The number is fixed when the run begins: restarting the coordinator without its file does not change it.
    """
    if config.model.keep_versions is not None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"keep_versions": keep_versions})})


def with_noise(config: RunConfig) -> RunConfig:
    """Return the settings of a run with its noise multiplier, which no later change of its budget or length changes."""
    rules = config.rules.privacy
    if rules is None or config.privacy is None:
        return config
    return _with_noise(config, rules.noise_multiplier, config.privacy.bands_of(config.rounds))


def _with_noise(config: RunConfig, noise_multiplier: float | None, bands: int | None) -> RunConfig:
    assert config.privacy is not None
    fixed = {"noise_multiplier": noise_multiplier, "bands": bands}
    return config.model_copy(update={"privacy": config.privacy.model_copy(update=fixed)})


def with_frozen(config: RunConfig, digest: str) -> RunConfig:
    """Return the settings of a run with the digest of the tensors that are never sent.

    Raises:
        ConfigError: the settings name a different digest.
    """
    if config.model.frozen not in ("", digest):
        found = f"the task's digest is {digest}" if digest else 'no tensor stays at the sites (Task(travels="trained"))'
        raise ConfigError([f"model.frozen: got {config.model.frozen}, and {found}: give the base with this digest"])
    return config.model_copy(update={"model": config.model.model_copy(update={"frozen": digest})})


def are_equal(config: RunConfig | None, wanted: RunConfig) -> bool:
    """Return whether a run has the wanted settings; these may omit what is determined by version 0."""
    return config is not None and not differing_keys(config, wanted)


def differing_keys(one: RunConfig, other: RunConfig) -> list[str]:
    """Return the keys, as for `--set`, in which the settings of a run differ from the wanted ones."""
    if one.model.keep_versions is not None:
        other = with_number_of_versions(other, one.model.keep_versions)
    if not other.model.frozen:
        other = with_frozen(other, one.model.frozen)
    if one.privacy is not None and other.privacy is not None:
        noise, bands = other.privacy.noise_multiplier, other.privacy.bands
        other = _with_noise(other, noise or one.privacy.noise_multiplier, bands or one.privacy.bands)
    return [*_differences(one.model_dump(), other.model_dump(), "")]


def changes_of(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two runs differ, each with both values, by the keys for `--set`.

    Values of `local` are listed individually; None: the value is absent.
    """
    documents = one.model_dump(), other.model_dump()
    found: dict[str, tuple[Any, Any]] = {}
    for key in _differences(*documents, ""):
        if key == "local":
            names = [name for name in {**one.local, **other.local} if one.local.get(name) != other.local.get(name)]
            found |= {f"local.{name}": (one.local.get(name), other.local.get(name)) for name in names}
        else:
            found[_as_set(key)] = (_value_at(documents[0], key), _value_at(documents[1], key))
    return found


def _as_set(key: str) -> str:
    """Return a key as for `--set`: the task's options are in its table."""
    return f"task.{key.removeprefix('options.')}" if key.startswith("options.") else key


def _value_at(document: Any, key: str) -> Any:
    for part in key.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document


def _differences(one: Any, other: Any, key: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict) and key != "local":
        for name in dict.fromkeys((*one, *other)):
            yield from _differences(one.get(name), other.get(name), f"{key}.{name}" if key else name)
    elif one != other:
        yield key


def moved_ends(old: RunConfig, new: RunConfig, *, version: int) -> Iterator[str]:
    """Yield a sentence on each schedule whose end moves with the number of rounds, after rounds with other values.

    A schedule without `rounds` ends with the run: the rounds so far differ from those of a run that had begun with the
    new number.
    """
    for table in ("local", "optimizer"):
        for name, schedule in getattr(new.schedule, table).items():
            before = getattr(old.schedule, table).get(name, schedule)
            ends_with_run = before.ends_with_run and schedule.ends_with_run
            if ends_with_run and new.rounds != old.rounds and version > schedule.same_until:
                key = f"schedule.{table}.{name}"
                yield (
                    f"{key} ends in round {new.rounds} now and did so in round {old.rounds} until here, so the values "
                    f"of rounds {schedule.same_until + 1} to {version} are not those of a run that begins with "
                    f"{new.rounds} rounds (--set {key}.rounds={old.rounds} keeps its end)"
                )


def may_go_on(old: RunConfig, new: RunConfig, *, version: int) -> bool:
    """Return whether a resume at a version could change a run's settings from `old` to `new`."""
    return not are_equal(old, new) and not [*_faults(old, new, version)]


def as_overrides(old: RunConfig, new: RunConfig) -> str:
    """Return the options of a resume that change one run's settings to another's, as far as they fit on a line."""
    values = {"rounds": new.rounds}
    keys = differing_keys(old, new)
    return " ".join(f"--set {_as_set(key)}={values.get(key, '...')}" for key in keys[:4]) + (
        " ..." if len(keys) > 4 else ""
    )
