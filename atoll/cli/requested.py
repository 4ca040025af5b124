"""The arguments and options of a command that are the parameters of an operation's request."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args

import typer

from atoll.cli import completion, options
from atoll.operations.requests import ARGUMENT, Param


def requested(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: the command gets an argument or option for each field of the request, and is called with it.

    Args:
        kind: the dataclass of the request, of `operations.requests`.
    """
    given = [_parameter(each) for each in dataclasses.fields(kind) if get_args(each.type)[1:]]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *others = inspect.signature(command).parameters.values()

        @functools.wraps(command)
        def run(**values: Any) -> None:
            request = kind(**{each.name: values.pop(each.name) for each in given})
            command(request, **values)

        parameters = [*given, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in others)]
        vars(run)["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _parameter(field: "dataclasses.Field[Any]") -> inspect.Parameter:
    """Return a field of a request as typer reads it in a signature."""
    of_type, told = get_args(field.type)[:2]
    assert isinstance(told, Param)
    shown: dict[str, Any] = {"metavar": told.metavar or None, "help": told.help}
    if told.least is not None:
        shown["callback"] = options.between(told.least)
    if field.name == "overrides":
        shown["autocompletion"] = completion.settings
    is_argument = told.flag == ARGUMENT
    flag = told.flag or f"--{field.name.replace('_', '-')}"
    info = typer.Argument(**shown) if is_argument else typer.Option(flag, **shown)
    is_list, default = of_type == Sequence[str], field.default
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    elif is_list:
        default = []
    if is_argument and type(None) in get_args(of_type):
        default = None
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[list[str] if is_list else of_type, info],
    )
