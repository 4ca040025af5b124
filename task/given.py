"""The values that a run gives to its task: overrides of `Local`, schedules of some of them, and the task's options.

They are sent as one table of plain values, which the site's approval covers, and which is the same in every round:

    {"epochs": 2, "lr": {"kind": "cosine", "start": 0.1, "rounds": 100}, "task.smoothing": 0.1}

A run with differential privacy also has its terms (`privacy.unit`, ...), by which each site of a guarantee for examples
trains: an Atoll that does not know them refuses them as unknown settings of `Local`. With `Task(travels="trained")` it
also has the digest of the tensors that are not exchanged, as `model.frozen`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.task.local import Local
from atoll.task.overrides import OverridesRefused, fits, read_value, types_of, words
from atoll.task.round_schedule import RoundSchedule, read_schedule

OPTION = "task."
"""The beginning of the keys that are options of the task."""

FROZEN = "model.frozen"
"""The key of the digest of the frozen tensors, which are not exchanged."""

PRIVACY = "privacy."
"""The beginning of the keys with the terms of differential privacy."""

NEVER_SCHEDULED = ("keep", "keep_optimizer")
"""The settings of `Local` that are the same in all rounds: they determine the layers of the global model, and whether a
client keeps its state."""

Plain = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Given:
    """The values of one run for its task."""

    local: Mapping[str, Any] = field(default_factory=dict)
    schedules: Mapping[str, RoundSchedule] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    private: Mapping[str, Any] = field(default_factory=dict)
    """The terms of a guarantee for examples, by the names of the settings in `[privacy]`; empty: there is none."""
    frozen: str = ""
    """The digest of the frozen tensors, which are not exchanged; empty: there are none, or any values are accepted."""

    @property
    def is_shared(self) -> bool:
        """Whether a training is one step whose noise the clients add in their secure sum."""
        return self.private.get("noise_by") == "clients"

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> "Given":
        """Parse a run's table of values for its task.

        Raises:
            OverridesRefused: a schedule has faults; the message lists all of them.
        """
        local: dict[str, Any] = {}
        schedules: dict[str, RoundSchedule] = {}
        options: dict[str, Any] = {}
        private: dict[str, Any] = {}
        faults: list[str] = []
        frozen = ""
        for key, value in table.items():
            if key.startswith(OPTION):
                options[key.removeprefix(OPTION)] = value
            elif key.startswith(PRIVACY):
                private[key.removeprefix(PRIVACY)] = value
            elif key == FROZEN:
                frozen = str(value)
            elif isinstance(value, Mapping):
                try:
                    schedules[key] = read_schedule(f"schedule.local.{key}", value)
                except OverridesRefused as error:
                    faults += error.faults
            else:
                local[key] = value
        if faults:
            raise OverridesRefused(*faults)
        if private.get("unit") == "client":
            private = {}  # the coordinator keeps it, and a site's budget charges it: no training changes by it
        return cls(local, schedules, options, private, frozen)

    def overrides(self, round_: int) -> dict[str, Any]:
        """Return the plain values of the local settings in a round.

        Raises:
            OverridesRefused: a schedule has no start.
        """
        return {**self.local, **{key: _at(key, schedule, round_) for key, schedule in self.schedules.items()}}

    def local_of(self, local: Local, round_: int) -> Local:
        """Return a task's settings in a round, overridden by the run's.

        Of a step with shared noise the update is the step's gradient: the server optimizer alone makes the step.

        Raises:
            OverridesRefused: some do not fit; the message lists all faults.
        """
        changed = local.with_overrides(self.local)
        if self.is_shared:
            return one_step(changed)
        if not self.schedules:
            return changed
        hints = types_of(Local)
        values: dict[str, Any] = {}
        fixed = [f"schedule.local.{key}: is the same in all rounds" for key in NEVER_SCHEDULED if key in self.schedules]
        known = ", ".join(name for name in hints if name not in NEVER_SCHEDULED)
        unknown = [f"schedule.local.{key}: unknown key (known: {known})" for key in self.schedules if key not in hints]
        if faults := fixed + unknown:
            raise OverridesRefused(*faults)
        for key, schedule in self.schedules.items():
            start = getattr(changed, key) if schedule.start is None else schedule.start
            try:
                value = _at(key, _starting(schedule, start), round_)
            except OverridesRefused as error:
                faults += error.faults
                continue
            is_whole = int in hints[key] and float not in hints[key]
            values[key] = round(value) if is_whole and isinstance(value, float) else value
        if faults:
            raise OverridesRefused(*faults)
        try:
            return changed.with_overrides(values)
        except OverridesRefused as error:
            raise OverridesRefused(*(f"schedule.{fault} in round {round_}" for fault in error.faults)) from None

    def check(self, local: Local, rounds: int) -> None:
        """Check that the settings of a task fit in each of the first rounds.

        Raises:
            OverridesRefused: some do not; the message lists the faults of each setting in the first such round.
        """
        turns = {1}.union(*(schedule.turns(rounds) for schedule in self.schedules.values()))
        faults: dict[str, str] = {}
        for turn in sorted(turns):
            try:
                self.local_of(local, turn)
            except OverridesRefused as error:
                for fault in error.faults:
                    faults.setdefault(fault.partition(":")[0], fault)
        if faults:
            raise OverridesRefused(*faults.values())


def with_values(
    defaults: Mapping[str, Any], values: Mapping[str, Any], *, where: str, declared_by: str
) -> dict[str, Any]:
    """Return the values that a task declares, overridden by given ones.

    Args:
        defaults: the declared values, whose types given values must have; None: all are allowed.
        values: the values of the declared types, or their text from a command line.
        where: the name of the table, for the messages.
        declared_by: the place where the task declares them, for the messages.

    Raises:
        OverridesRefused: unknown keys or wrong types; the message lists all faults.
    """
    faults = []
    changed = dict(defaults)
    for key, given in values.items():
        if key not in defaults:
            known = ", ".join(defaults) or "none"
            faults.append(f"{where}.{key}: unknown key, got {given!r} (known, from {declared_by}: {known})")
            continue
        kind = type(defaults[key])
        hint = (bool, int, float, str) if defaults[key] is None else (kind,)
        value: Any = read_value(hint, given) if isinstance(given, str) and kind is not str else given
        if fits(hint, value):
            changed[key] = float(value) if kind is float else value
        else:
            faults.append(f"{where}.{key}: expected {words(hint)}, got {given!r}")
    if faults:
        raise OverridesRefused(*faults)
    return changed


def with_tables(
    defaults: Mapping[str, Any],
    before: Mapping[str, Mapping[str, Any]],
    tables: Mapping[str, Mapping[str, Any]],
    sites: Collection[str],
) -> dict[str, dict[str, Any]]:
    """Return the settings of a task's sites, overridden by tables of other values.

    Args:
        defaults: the settings that the task declares.
        before: the settings of some sites, in the task.
        tables: the given values by site.
        sites: the sites of the task.

    Raises:
        OverridesRefused: unknown sites or names, wrong types; the message lists all faults.
    """
    faults = [f"sites.{site}: no site of the task (its sites: {', '.join(sites)})" for site in {*tables} - {*sites}]
    changed = {site: dict(values) for site, values in before.items()}
    for site, values in tables.items():
        try:
            every = with_values(defaults, values, where=f"sites.{site}", declared_by="Task(settings=...)")
            changed[site] = {**changed.get(site, {}), **{name: every[name] for name in values}}
        except OverridesRefused as error:
            faults += error.faults
    if faults:
        raise OverridesRefused(*sorted(faults))
    return changed


def value_faults(name: str, values: object) -> list[str]:
    """List the faults of declared values: malformed names, values that are not plain."""
    if not isinstance(values, Mapping):
        return [f"{name} must be a mapping from name to value, got {values!r}"]
    return [
        f"{name}: {key!r} must be a name with a number, a string, true, false or None, got {value!r}"
        for key, value in values.items()
        if not (isinstance(key, str) and key.isidentifier() and isinstance(value, Plain | None))
    ]


def _starting(schedule: RoundSchedule, start: Any) -> RoundSchedule:
    is_number = isinstance(start, int | float) and not isinstance(start, bool)
    return replace(schedule, start=start) if is_number and schedule.values is None else schedule


def one_step(local: Local) -> Local:
    """Return settings whose update is the gradient of one step, with the sign of a descent."""
    return replace(
        local,
        epochs=1,
        max_steps=1,
        optimizer="sgd",
        lr=1.0,
        momentum=0.0,
        weight_decay=0.0,
        decay_vectors=True,
        clip_norm=None,
        prox_mu=0.0,
        keep_optimizer=False,
    )


def _at(key: str, schedule: RoundSchedule, round_: int) -> Any:
    try:
        return schedule.at(round_)
    except ValueError as error:
        raise OverridesRefused(f"schedule.local.{key}: {error}: set local.{key}, or start") from None
