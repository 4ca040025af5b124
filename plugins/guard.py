"""The guard around custom code: an error names the object and the call, and is of the class that its kind allows.

A kind's contract is a subclass of `Guarded` beside the protocol that it keeps: it checks what each call returns. For a
kind that is a single function, `called` is enough.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

RAISED = (Exception, SystemExit)
"""The exceptions of custom code, which may call `sys.exit`; KeyboardInterrupt passes."""


def told(error: BaseException, name: str = "") -> str:
    """Describe an error of custom code in words; a ValueError's message is taken unchanged.

    Args:
        error: the exception that the code raised.
        name: the name of the object and the call; empty: the sentence has them already.
    """
    explains_itself = type(error) is ValueError
    words = str(error) if explains_itself else f"{type(error).__name__}: {error}"
    return f"{name}{':' if explains_itself else ' raised'} {words}" if name else words


def called(
    name: str,
    function: Callable[..., Any],
    *arguments: Any,
    failed: Callable[[str], Exception],
    passing: tuple[type[Exception], ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return the result of a call of custom code.

    Args:
        name: the name of the object and the call, for the error.
        function: custom.
        arguments: the arguments, by position.
        failed: makes the error from its sentence.
        passing: exceptions that the contract allows, which are raised unchanged.
        options: arguments by name.

    Raises:
        Exception: the error by `failed`, if the code raised any other exception.
    """
    try:
        return function(*arguments, **(options or {}))
    except passing:
        raise
    except RAISED as error:
        raise failed(told(error, name)) from error


class Guarded:
    """A custom object behind the contract of its kind.

    Args:
        name: the name of the object, for errors.
        custom: the object.
    """

    failed: ClassVar[type[Exception]]
    """The error of a call that breaks the contract by its result or exception."""
    passing: ClassVar[tuple[type[Exception], ...]] = ()
    """The exceptions by which the contract lets the object refuse its arguments."""

    def __init__(self, name: str, custom: Any) -> None:
        self.name, self.custom = name, custom

    def call(
        self, method: str, *arguments: Any, place: object = None, into: Callable[[Any], Any] = lambda result: result
    ) -> Any:
        """Return the result of a method.

        Args:
            method: its name.
            arguments: the arguments, by position.
            place: the `Place` of the call, for a method with a parameter `place`.
            into: converts the result; its exceptions count as the method's.

        Raises:
            Exception: `failed`, with the names of the object and the method; or one of `passing`.
        """
        function = getattr(self.custom, method)
        options = {"place": place} if place is not None and _takes_place(function) else {}
        return called(
            f"{self.name}: {method}",
            lambda: into(function(*arguments, **options)),
            failed=self.failed,
            passing=self.passing,
        )


def _takes_place(function: Callable[..., Any]) -> bool:
    try:
        return "place" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
