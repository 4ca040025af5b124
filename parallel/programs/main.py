"""The process of a server program: `python -m atoll.parallel.programs.main FD`, the descriptor of its socket.

The coordinator's first line names the program, `module:function`, `path/to/file.py:function` or a Flower app, and the
seed of its generators. The process calls it with its grid, and tells how it has ended:

    returned              the function has returned, or has exited with 0
    raised  detail        it has raised, or cannot be loaded

It has no credential and no address: all that it can do is to call over the socket. Prints go to the log.
"""

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from atoll.parallel.exit_functions import run_exit_functions
from atoll.parallel.heap import keep_freed_blocks
from atoll.parallel.log_streams import write_to_log
from atoll.parallel.programs.grid import Grid
from atoll.parallel.programs.link import Link
from atoll.parallel.task.flower_app import is_app, read_app
from atoll.parallel.task.noise import Noise
from atoll.parallel.task.randomness import seed_everything
from atoll.parallel.task.reference import load_module, split

DETAIL_MAX = 2000


def main() -> None:
    """Run the program of the coordinator's order."""
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
    os._exit(0)  # threads of the program may still run, and nobody waits for them


def load(reference: str, options: Mapping[str, Any]) -> Callable[[Grid], Any]:
    """Return the function that a reference names, or that a Flower ServerApp with this run config is.

    Raises:
        ValueError: there is none, or an app has no such run config.
        Exception: any error that its module raises.
    """
    if is_app(reference):
        from atoll.parallel.flower.secret_noise import flower_noise  # imports flwr
        from atoll.parallel.flower.server_host import server_app_of
        from atoll.parallel.programs.flower_grid import as_program

        flower_noise().load()
        app = read_app(reference)
        return as_program(server_app_of(app), app.run_config(options))
    place, attribute = split(reference)
    found = getattr(load_module(reference), attribute, None)
    if type(found).__module__.startswith("flwr.") and type(found).__name__ == "ServerApp":
        from atoll.parallel.programs.flower_grid import as_program

        return as_program(found, options)
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
