"""Flower as a framework of apps, with the interface of `task.apps`. Importing this imports no flwr."""

from collections.abc import Callable, Mapping
from typing import Any

from atoll.flower.app import read_app


def name_of(reference: str) -> str:
    """Return the name of an app's task, `flower:PUBLISHER/NAME`; errors as in `app.read_app`."""
    return read_app(reference).task


def bench(reference: str, request: dict[str, Any]) -> Any:
    """Make the `Bench` of a request's site, or without a site the coordinator's, in which `main()` runs."""
    from atoll.flower.bench import ClientBench, MainBench  # imports flwr

    return (MainBench if request.get("site") is None else ClientBench)(read_app(reference), request)


def program(reference: str, options: Mapping[str, Any]) -> Callable[[Any], None]:
    """Return an app's ServerApp as a server program.

    Raises:
        ValueError: the app has no such run config; the message lists all faults.
    """
    from atoll.flower.hosted.grid import as_program  # imports flwr
    from atoll.flower.secret_noise import flower_noise
    from atoll.flower.server_host import server_app_of

    flower_noise().load()
    app = read_app(reference)
    return as_program(server_app_of(app), app.run_config(options))


def program_of(found: object, options: Mapping[str, Any]) -> Callable[[Any], None] | None:
    """Return a ServerApp as a server program; None: the object is no ServerApp."""
    if not (type(found).__module__.startswith("flwr.") and type(found).__name__ == "ServerApp"):
        return None
    from atoll.flower.hosted.grid import as_program  # imports flwr

    return as_program(found, options)
