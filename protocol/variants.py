"""Kinds of a setting by name, each with its own options, in one flat table of a TOML file.

The table's model declares all options, each optional, with its type and its documentation; a choice says which of them
each kind has and which it must have. So a table stays flat: `rule = "trimmed_mean"`, `malicious = 2`.
"""

from collections.abc import Callable, Mapping, Set
from typing import Any

from atoll.ground.faults import Refused

Given = dict[str, Any]
"""The options that a table gives to a kind, by name."""


class Variant:
    """Kind with the names of its options.

    Args:
        needed: options that must be given.
        others: options that have a default.
        fault: options -> why they do not go together; empty: they do.
    """

    def __init__(self, *needed: str, others: tuple[str, ...] = (), fault: Callable[[Given], str] | None = None) -> None:
        self.needed, self.options = frozenset(needed), frozenset({*needed, *others})
        self.fault = fault or (lambda given: "")


class Choice:
    """Choice of one kind by its name.

    Args:
        variants: the kinds by name.
    """

    def __init__(self, variants: Mapping[str, Variant]) -> None:
        self.variants = variants

    def options_of(self, name: str) -> frozenset[str]:
        """Return the names of a kind's options; empty for a name that is not a variant, such as a custom object."""
        return self.variants[name].options if name in self.variants else frozenset()

    def pick(self, name: str, given: Mapping[str, Any], *, also: Set[str] = frozenset(), label: str = "") -> Given:
        """Return the given options of a kind; empty for a name that is not a variant.

        Args:
            name: the name of the kind.
            given: the options in the table; None counts as not given.
            also: options that are allowed beside the kind's, but do not belong to the variant.
            label: the name of the kind in an error; empty: `name`.

        Raises:
            ValueError: options that the kind does not have, or required ones that are missing; all faults at once.
        """
        label, allowed = label or name, self.options_of(name) | also
        options = {key: value for key, value in given.items() if value is not None}
        own = {key: value for key, value in options.items() if key in self.options_of(name)}
        faults = []
        if wrong := sorted(options.keys() - allowed):
            known = ", ".join(sorted(allowed)) or "none"
            faults.append(f"{', '.join(wrong)} is not an option of {label} (allowed: {known})")
        if variant := self.variants.get(name):
            if missing := sorted(variant.needed - own.keys()):
                faults.append(f"{label} needs {', '.join(missing)}")
            elif fault := variant.fault(own):
                faults.append(fault)
        if faults:
            raise Refused(*faults)
        return own
