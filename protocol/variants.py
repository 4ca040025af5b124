"""Discriminated unions of settings: kinds by name, each with its own options, in one flat table of a TOML file.

The table's model declares all options, each optional and documented; the union says which of them each kind has and
which it must have. So a table stays flat (`rule = "trimmed_mean"`, `malicious = 2`), and each kind has a class for its
settings.
"""

from collections.abc import Mapping, Set
from typing import Annotated, Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from atoll.ground.faults import Refused

VARIANT = ConfigDict(extra="forbid", frozen=True, defer_build=True)
"""Validators are built on first use: a command that shows a run needs none."""


class Variant(BaseModel):
    """Kind with its options; a field without a default is required."""

    model_config = VARIANT

    def options(self, *tags: str) -> dict[str, Any]:
        """Return the given options, without the tags that name the kind."""
        return self.model_dump(exclude=set(tags), exclude_none=True)


Kind = TypeVar("Kind", bound=Variant)


class Choice(Generic[Kind]):
    """Choice of one variant by its name.

    Args:
        union: the union of the variants; each has a `Literal` field `tag` with its names.
        tag: the name of that field, the discriminator.
    """

    def __init__(self, union: Any, tag: str) -> None:
        self._tag = tag
        self._adapter: TypeAdapter[Kind] = TypeAdapter(
            Annotated[union, Field(discriminator=tag)], config=ConfigDict(defer_build=True)
        )
        variants: tuple[type[Kind], ...] = get_args(union)
        self.variants: Mapping[str, type[Kind]] = {
            name: variant for variant in variants for name in get_args(variant.model_fields[tag].annotation)
        }

    def options_of(self, name: str) -> frozenset[str]:
        """Return the names of a kind's options; empty for a name that is not a variant, such as a custom object."""
        variant = self.variants.get(name)
        return frozenset() if variant is None else frozenset(variant.model_fields) - {self._tag}

    def pick(
        self, name: str, given: Mapping[str, Any], *, also: Set[str] = frozenset(), label: str = ""
    ) -> Kind | None:
        """Return the variant of a name with the given options; None for a name that is not a variant.

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
        faults = []
        if wrong := sorted(options.keys() - allowed):
            known = ", ".join(sorted(allowed)) or "none"
            faults.append(f"{', '.join(wrong)} is not an option of {label} (allowed: {known})")
        own = {key: value for key, value in options.items() if key in self.options_of(name)}
        picked: Kind | None = None
        try:
            picked = self._adapter.validate_python({self._tag: name} | own) if name in self.variants else None
        except ValidationError as error:
            missing = sorted(str(fault["loc"][-1]) for fault in error.errors() if fault["type"] == "missing")
            faults += [f"{label} needs {', '.join(missing)}"] * bool(missing)
            faults += [_text(fault) for fault in error.errors() if fault["type"] != "missing"]
        if faults:
            raise Refused(*faults)
        return picked


def _text(fault: ErrorDetails) -> str:
    """Return the message of the variant's validator, or pydantic's with the option."""
    said = fault.get("ctx", {}).get("error")
    return f"{fault['loc'][-1]}: {fault['msg']}" if said is None else str(said)
