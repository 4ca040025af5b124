"""The reader of settings: a TOML file, `--set key=value` over it, defaults under it; all faults at once, a line each.

    run.toml: round.quorum: got 'six'; allowed: integer | number
    run.toml: round.cohort_sise: unknown key (did you mean cohort_size? known: cohort_size, over_selection, quorum, ...)
    --set: round.retry: got -1; allowed: integer >= 0, <= 1000000

A model is a class `Model(BaseModel, **STRICT)` of pydantic; the string under a field is its documentation.
"""

import difflib
import json
import math
import re
import reprlib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from atoll.ground.faults import faults_in
from atoll.ground.folders import in_words
from atoll.ground.text_files import NotText, text_of
from atoll.protocol.attribute_docs import attribute_docs
from atoll.protocol.json_values import flat
from atoll.protocol.secrets import without_password

Model = TypeVar("Model", bound=BaseModel)
Built = TypeVar("Built")

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)
"""Configuration of every settings model: frozen, no unknown keys, no conversion between types."""

Finite = Annotated[float, Field(allow_inf_nan=False)]


def _that_travels(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise ValueError("a whole number beyond 64 bits cannot be sent; allowed: a smaller one, or a finite float")
    return value


Plain = bool | Annotated[int, AfterValidator(_that_travels)] | Finite | str
"""Value that a message may carry; it cannot contain code."""

Folder = Annotated[Path, Field(strict=False)]
"""Type of a setting that is a path, written as a string, relative to the current directory."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_OPEN_FRACTION = re.compile(r"[+-]?(\.\d+|\d+\.)([eE][+-]?\d+)?")
"""Number as a shell and most languages take it, and TOML does not: `.2`, `1.`."""
_TYPE_WORDS = {int: "integer", float: "number", bool: "true | false", str: "string", Path: "path", NoneType: ""}
_BOUNDS = (
    ("gt", "> {}"),
    ("ge", ">= {}"),
    ("lt", "< {}"),
    ("le", "<= {}"),
    ("min_length", "length >= {}"),
    ("max_length", "length <= {}"),
    ("pattern", "of the form {}"),
)


class _Short(reprlib.Repr):
    def repr_int(self, value: int, level: int) -> str:
        """Describe a huge integer by its bits: Python prints at most 4,300 digits, TOML's hexadecimal allows more."""
        many = value.bit_length() > 10_000
        return f"an integer of {value.bit_length()} bits" if many else super().repr_int(value, level)


_SHORT = _Short()


def short(value: object) -> str:
    """Return a value of any size, shortened for a reader of a fault."""
    return _SHORT.repr(value)


class ConfigError(ValueError):
    """Error: all mistakes of the operator, one line each in `faults`."""

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__("\n".join(self.faults))


def or_faults(build: Callable[[], Built], faults: list[str]) -> Built | None:
    """Return the result of `build`, or None after adding the faults of its ConfigError to the list."""
    try:
        return build()
    except ConfigError as error:
        faults += error.faults
        return None


def load(
    model_type: type[Model],
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    context: Mapping[str, Any] | None = None,
) -> Model:
    """Read settings from a file (None: defaults only) and from `key=value` overrides.

    Args:
        model_type: the model of the settings.
        path: the file.
        overrides: they take precedence over the file.
        context: passed to the validators of the model.

    Raises:
        ConfigError: the file cannot be read, or anything in it or in the overrides is not allowed.
    """
    if path is None:
        return load_text(model_type, "", overrides, name="", context=context)
    try:
        text = text_of(path.read_bytes(), path)
    except OSError as error:
        raise ConfigError([in_words(error)]) from error
    except NotText as error:
        raise ConfigError([str(error)]) from error
    return load_text(model_type, text, overrides, name=str(path), context=context)


def load_text(
    model_type: type[Model],
    text: str,
    overrides: Sequence[str] = (),
    *,
    name: str,
    context: Mapping[str, Any] | None = None,
) -> Model:
    """Read settings from the text of a TOML file.

    Args:
        model_type: the model of the settings.
        text: the file's text.
        overrides: `key=value`, which take precedence over the text.
        name: name of the file in the faults.
        context: passed to the validators of the model.

    Raises:
        ConfigError: anything in the text or in the overrides is not allowed.
    """
    faults = []
    document: dict[str, Any] = {}
    short_tables: ShortTables = getattr(model_type, "short_tables", {})
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or an integer of thousands of digits
        faults.append(_line(name, f"not TOML: {error}"))
    overridden = []
    for override in overrides:
        try:
            overridden.append(_apply(override, document, short_tables))
        except ValueError as error:
            faults.append(_line("--set", str(error)))
    if faults:
        raise ConfigError(faults)
    _in_full(document, short_tables)
    for field, depth in getattr(model_type, "dotted_names", {}).items():
        document |= {field: _dotted(document[field], depth)} if field in document else {}
    try:
        return model_type.model_validate(document, context=context)
    except ValidationError as error:
        for key, found in _found(model_type, error, document):
            is_set = any(f"{_shown(key)}.".startswith(f"{'.'.join(start)}.") for start in overridden)
            faults += [_line("--set" if is_set else name, what) for what in found]
    raise ConfigError(faults)


def load_recorded(model_type: type[Model], text: str, *, context: Mapping[str, Any] | None = None) -> Model:
    """Read settings from the JSON in which Atoll has stored them.

    Raises:
        ConfigError: they are no settings, or this Atoll does not allow them.
    """
    try:
        return model_type.model_validate_json(text, context=context)
    except ValidationError as error:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise ConfigError(["no settings in JSON"]) from None
        faults = [what for _, found in _found(model_type, error, document) for what in found]
    raise ConfigError(faults)


def _line(source: str, what: str) -> str:
    return f"{source}: {what}" if source else what


# ---------------------------------------------------------------- --set


ShortTables = Mapping[str, tuple[str, str]]
"""Strings that may be written as a table: the key of the string in it, and the field for its other keys."""


def _in_full(document: dict[str, Any], short_tables: ShortTables) -> None:
    """Expand the tables of a document that stand for a string into the string and the field of their other keys."""
    for name, (key, others) in short_tables.items():
        table = document.get(name)
        if isinstance(table, dict):
            rest = {each: value for each, value in table.items() if each != key}
            document[others] = {**document.get(others, {}), **rest}
            del document[name]
            if key in table:
                document[name] = table[key]


def _dotted(table: Any, depth: int) -> Any:
    """Return a table of values, `depth` levels down, by dotted names: `{optimizer = {lr = 1}}` as `optimizer.lr`."""
    if not isinstance(table, dict):
        return table
    return {name: _dotted(item, depth - 1) for name, item in table.items()} if depth else flat(table)


def _apply(override: str, document: dict[str, Any], short_tables: ShortTables) -> tuple[str, ...]:
    """Set `a.b=value` in the document and return its key in the model; raises ValueError."""
    name, equals, text = override.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or not all(_BARE_KEY.fullmatch(part) for part in key):
        raise ValueError(f"got {without_password(override)!r}; allowed: key=value, with a key such as round.quorum")
    table = document
    value = value_of(".".join(key), text.strip())
    is_within = len(key) > 1 or isinstance(value, dict)
    if is_within and isinstance(text_alone := document.get(key[0]), str) and key[0] in short_tables:
        document[key[0]] = {short_tables[key[0]][0]: text_alone}
    if not is_within and key[0] not in short_tables and isinstance(document.get(key[0]), dict):
        what = f"{key[0]}: got {short(text.strip())}, and a table is not taken away by an option"
        raise ValueError(f"{what}; allowed: a table; a new run, from settings without [{key[0]}], has none")
    for part in key[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ValueError(f"{'.'.join(key)}: {part} is not a table")
    is_table = len(key) == 1 and isinstance(value, dict) and isinstance(table.get(key[0]), dict)
    table[key[-1]] = {**table[key[-1]], **value} if is_table else value  # keeps the file's other settings
    reference, others = short_tables.get(key[0], ("", ""))
    return (others, *key[1:]) if others and len(key) > 1 and key[1] != reference else key


def is_bare(name: object) -> bool:
    """Return whether a name can be a TOML key without quotes."""
    return isinstance(name, str) and _BARE_KEY.fullmatch(name) is not None


def value_of(key: str, text: str) -> Any:
    """Return the value of an override: a TOML value, a number as `.2`, or, if it does not begin like one, a string.

    Raises:
        ValueError: the value is not valid TOML; the message names the key.
    """
    if _OPEN_FRACTION.fullmatch(text):
        return float(text)
    try:
        table = tomllib.loads(f"value = {text}")
        if table.keys() == {"value"}:
            return table["value"]
    except (ValueError, RecursionError):
        if text and text[0] not in "\"'[{" and text.isprintable():
            return text
    raise ValueError(f"{key}: got {without_password(text)!r}; allowed: a TOML value or a bare word")


# ---------------------------------------------------------------- faults


Key = tuple[str | int, ...]
"""Place of a value in a document: names of keys, and the numbers of tables in a list of tables."""


def _key(detail: ErrorDetails, document: Any) -> Key:
    """Return a fault's key in the document: its location without pydantic's names for the branches of a union."""
    key: list[str | int] = []
    for part in detail["loc"]:
        is_in_list = isinstance(document, list) and isinstance(part, int) and isinstance(document[part], dict)
        if is_in_list or (isinstance(document, dict) and part in document):
            document = document[part]
        elif detail["type"] != "missing" or part != detail["loc"][-1]:
            break
        key.append(part)
    return tuple(key)


def _shown(key: Key) -> str:
    """Return a key as a person writes it: `privacy.data[0].name`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")


HIDDEN = "hidden"
"""Type of the error (`PydanticCustomError`) about a value that may be a secret and is not repeated."""


def _found(
    model_type: type[BaseModel], error: ValidationError, document: dict[str, Any]
) -> Iterator[tuple[Key, list[str]]]:
    """Yield the keys with faults, each with its sentences."""
    errors: dict[Key, list[ErrorDetails]] = {}
    for detail in error.errors():
        errors.setdefault(_key(detail, document), []).append(detail)
    short_tables: ShortTables = getattr(model_type, "short_tables", {})
    written = {others: table for table, (_, others) in short_tables.items()}
    for key, details in errors.items():
        shown = _shown((written.get(str(key[0]), key[0]), *key[1:]) if len(key) > 1 else key)
        yield key, _faults(model_type, key, details, document, shown)


def _faults(
    model_type: type[BaseModel], key: Key, details: list[ErrorDetails], document: Any, dotted: str
) -> list[str]:
    if details[0]["type"] == "extra_forbidden":
        return [f"{dotted}: unknown key ({_known(str(key[-1]), _annotation(model_type, key[:-1]))})"]
    allowed = type_text(_annotation(model_type, key))
    if details[0]["type"] == "missing":
        return [f"{dotted}: missing; allowed: {allowed}"]
    for part in key:
        document = document[part]
    errors = [detail["ctx"]["error"] for detail in details if detail["type"] == "value_error"]
    if errors and isinstance(document, dict):  # the fields of the table contradict each other
        return [_line(dotted, fault) for error in errors for fault in faults_in(error)]
    if hidden := [detail["msg"] for detail in details if detail["type"] == HIDDEN]:
        return [f"{dotted}: {message}" for message in hidden]
    got = f"{dotted}: got {short(without_password(document) if isinstance(document, str) else document)}"
    is_odd = isinstance(document, float) and not math.isfinite(document)
    return [f"{got}: {error}" for error in errors] or [f"{got}; allowed: {allowed}{', finite' * is_odd}"]


def _known(name: str, table: Any) -> str:
    names = list(table.model_fields)
    near = difflib.get_close_matches(name, names, n=1)
    return "".join(f"did you mean {other}? " for other in near) + f"known: {', '.join(names)}"


def _annotation(model_type: type[BaseModel], key: Key) -> Any:
    """Return the declared type at a key."""
    found: Any = model_type
    for part in key:
        if (table := _table_in(found)) is not None:
            found = _declared(table.model_fields[str(part)])
        elif (tables := tables_in(found)) is not None:
            found = tables
        elif get_origin(found) is dict:
            found = get_args(found)[1]
    return _table_in(found) or found


def _table_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field that is a table, or a table or absent; None: it is something else."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType] if _is_union(annotation) else [annotation]
    is_table = len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel)
    return kinds[0] if is_table else None


def tables_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of the tables in a field that is a list of tables; None: it is something else."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return _table_in(get_args(annotation)[0]) if get_origin(annotation) is list else None


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _declared(field: FieldInfo) -> Any:
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


# ---------------------------------------------------------------- documentation


@dataclass(frozen=True, slots=True)
class Setting:
    """Documented key; `default` is TOML, and empty if there is none or `is_required`."""

    key: str
    type: str
    default: str
    doc: str
    is_required: bool


def describe(model_type: type[BaseModel]) -> list[Setting]:
    """Return every key of a model, in the order of its fields."""
    return list(_describe(model_type, ""))


def _describe(model_type: type[BaseModel], prefix: str) -> Iterator[Setting]:
    docs = attribute_docs(model_type)
    for name, field in model_type.model_fields.items():
        if (table := _table_in(field.annotation)) is not None:
            yield from _describe(table, f"{prefix}{name}.")
            continue
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        yield Setting(
            key=prefix + name,
            type=type_text(_declared(field)),
            default="" if default is None else _toml(default),
            doc=docs.get(name, ""),
            is_required=field.is_required(),
        )
        if (tables := tables_in(field.annotation)) is not None:
            yield from _describe(tables, f"{prefix}{name}[].")


def type_text(annotation: Any) -> str:
    """Return a type in words: `number > 0, <= 3600 | "adaptive"`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [text for part in arguments[1:] for text in _bounds(part)]
        return f"{type_text(arguments[0])} {', '.join(bounds)}".strip()
    if origin is Literal:
        return " | ".join(_toml(value) for value in arguments)
    if _is_union(annotation):
        return " | ".join(text for argument in arguments if (text := _branch_text(argument)))
    if origin is Callable:
        return ""  # no file can contain one
    if origin in (list, tuple):
        return f"list of ({type_text(arguments[0])})"
    return _TYPE_WORDS.get(annotation, "table")


def _branch_text(annotation: Any) -> str:
    """Return one branch of a union in words; a table in it has no separate section, so its keys are listed here."""
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return type_text(annotation)
    fields = (f"{name}: {type_text(_declared(field))}" for name, field in annotation.model_fields.items())
    return f"{{{', '.join(fields)}}}"


def _bounds(part: Any) -> list[str]:
    if isinstance(part, FieldInfo):
        return [text for inner in part.metadata for text in _bounds(inner)]
    values = [(form, getattr(part, name, None)) for name, form in _BOUNDS]
    return [
        form.format(_toml(value) if isinstance(value, int) else value) for form, value in values if value is not None
    ]


def quoted(text: str) -> str:
    """Return a string in TOML's notation, on one line; JSON's notation differs beyond 16 bits."""
    return tomli_w.dumps({"t": text}).removeprefix("t = ").rstrip("\n")


WHOLE = "whole"
"""Context of a serializer (`field_serializer`) that hides what may be secret from everyone except the owner."""


def effective(model: BaseModel, *, whole: bool = False) -> str:
    """Return the settings as a TOML file that loads to an equal model, except for secrets, which are hidden.

    Passwords in URLs are omitted.

    Args:
        model: the settings.
        whole: include all other secrets: only the file's owner may read it.
    """
    return tomli_w.dumps(_writable(model.model_dump(context={WHOLE: whole})))


def _writable(value: Any) -> Any:
    """Return a value in TOML's types: without None, with paths as strings and URLs without their passwords."""
    match value:
        case dict():
            return {name: _writable(item) for name, item in value.items() if item is not None}
        case list() | tuple():
            return [_writable(item) for item in value]
        case str() | Path():
            return without_password(str(value))
        case _:
            return value


def _toml(value: Any) -> str:
    """Return a default on one line for the documentation, as JSON, which is valid TOML for these types."""
    return json.dumps(value, ensure_ascii=False, default=str)
