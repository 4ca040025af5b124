"""The process of a server program: `python -m atoll.task.programs.main FD`, the descriptor of its socket.

The coordinator's first line names the program, `module:function`, `path/to/file.py:function` or an app, and the
seed of its generators. The process calls it with its grid, and reports its end:

    returned              the function has returned, or has exited with 0
    raised  detail        it has raised, or cannot be loaded

It has no credential and no address: it can only call over the socket. Prints go to the log.
"""

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from atoll.ground.process.exit_functions import run_exit_functions
from atoll.ground.process.heap import keep_freed_blocks
from atoll.ground.process.log_streams import write_to_log
from atoll.plugins.reference import load_module, split
from atoll.task.apps import framework, is_app
from atoll.task.noise import Noise
from atoll.task.programs.grid import Grid
from atoll.task.programs.link import Link
from atoll.task.randomness import seed_everything

DETAIL_MAX = 2000


def main() -> None:
    """Run the server program that the coordinator's first line names."""
    keep_freed_blocks()
    write_to_log()
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    order = link.order()
    raised: BaseException | None = None
    try:
        Noise.on_public = staticmethod(cache(partial(link.tell, "public", call=0)))
        program = load(order["program"], order["options"])
        seed_everything(order["seed"])
        program(Grid(link, order))
    except BaseException as error:
        raised = error
    if raised is not None and not (isinstance(raised, SystemExit) and not raised.code):
        traceback.print_exception(raised)
        run_exit_functions()
        link.tell("raised", detail=_conclusion(raised))
    else:
        run_exit_functions()
        link.tell("returned")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the program may still run; they are not joined


def load(reference: str, options: Mapping[str, Any]) -> Callable[[Grid], Any]:
    """Return the function that a reference names, or the server program of an app with this run config.

    Raises:
        ValueError: there is no such function, or an app has no such run config.
        Exception: any error that its module raises.
    """
    if is_app(reference):
        return framework().program(reference, options)
    place, attribute = split(reference)
    found = getattr(load_module(reference), attribute, None)
    if program := framework().program_of(found, options):
        return program
    if not callable(found):
        raise ValueError(f"{reference}: there is no function {attribute} in {place}")
    function: Callable[[Grid], Any] = found
    return function


def _conclusion(error: BaseException) -> str:
    """Return the last line of a traceback, with the place in the program that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    detail = "".join(traceback.format_exception_only(error)).strip()[-DETAIL_MAX:] + place
    return detail.encode(errors="backslashreplace").decode()  # a lone surrogate has no place in the journal


if __name__ == "__main__":
    main()
