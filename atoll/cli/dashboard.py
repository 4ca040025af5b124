"""`atoll dashboard`: runs, rounds, sites and members as pages in a browser."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.command import if_stopped
from atoll.cli.printing import note, say
from atoll.operations.faults import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.dashboard.process import Wanted

NEEDED = ("starlette", "uvicorn", "jinja2", "anyio")
"""The packages of the extra `dashboard`."""

LINK = "link"

Places = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PLACE ...]",
        help="Coordinators' state directories, HOST:PORT of a joined coordinator, URLs of databases, and folders of "
        "simulations or sweeps, searched two levels deep; by default those of this folder. The word `link` alone "
        "prints another link to a dashboard that runs.",
    ),
]
Listen = Annotated[
    str,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="Address; port 0: a free one; by default 127.0.0.1:7080. On other interfaces than loopback by TLS, for "
        "browsers with a certificate of the coordinator's authority alone. Or unix:PATH, a socket for a proxy.",
    ),
]
Open = Annotated[bool, typer.Option("--open", help="Open the link in this user's browser.")]
NoLive = Annotated[
    bool, typer.Option("--no-live", help="Follow no run: a page changes when it is loaded again.", show_default=False)
]

Control = Annotated[
    bool,
    typer.Option(
        "--control",
        help="Also offer forms that pause, resume and stop runs, ask for statistics, and invite and revoke members, "
        "with your credential; without it nothing is changed.",
    ),
]
UserHeader = Annotated[
    str,
    typer.Option(
        "--user-header",
        metavar="NAME",
        help="Header in which the proxy names its user, such as X-Forwarded-User; with --listen unix:PATH alone.",
    ),
]
Users = Annotated[
    str,
    typer.Option(
        "--users",
        metavar="FILE",
        help="TOML with the proxy's names in browsers (hosts) and the roles of its users (users); read at each change.",
    ),
]


def dashboard(
    places: Places = None,
    listen: Listen = "",
    open_: Open = False,
    control: Control = False,
    user_header: UserHeader = "",
    users: Users = "",
    no_live: NoLive = False,
) -> None:
    """Show runs, rounds, sites and members as pages in a browser. It reads and, without --control, changes nothing.

    It prints a link that opens a session once, within ten minutes; `atoll dashboard link` prints another one. Every
    page is also JSON, at the same address with `.json` at its end. The process has a low priority, and ends with a
    signal.
    """
    if_stopped("before it listened")
    _check_packages()
    from atoll.dashboard import listener
    from atoll.interface.errors import AtollError

    try:
        if places == [LINK] and not Path(LINK).exists():
            say(listener.another_link(listen, listener.runtime_folder(), time.time()))
            return
        from atoll.dashboard.process import Wanted

        wanted = Wanted(listen or listener.DEFAULT, not no_live, control, user_header, users)
        _serve(places or [], wanted, open_=open_)
    except AtollError as error:
        raise CommandError(*error.faults) from None


def _check_packages() -> None:
    """Check that the packages of the extra are installed; raises CommandError."""
    from importlib.util import find_spec

    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise CommandError(
            f"atoll dashboard needs {', '.join(missing)}, which this Python lacks: pip install 'atoll[dashboard]'"
        )


def _serve(places: list[str], wanted: "Wanted", *, open_: bool) -> None:
    from atoll.cli import log
    from atoll.dashboard.process import serve
    from atoll.protocol import service_manager
    from atoll.protocol.signals import call_at_end

    log.configure("dashboard")

    def ready(address: str, link: str) -> None:
        if link:
            note(f"the pages are at {address}; this link opens a session, once, within ten minutes:")
        elif address.startswith("https:"):
            note("the pages are for browsers with a certificate of this coordinator (`atoll join --p12 FILE`):")
        else:
            note("the pages are for a proxy, at this socket:")
        say(link or address)
        service_manager.tell(service_manager.READY, f"the pages are at {address}")
        if open_ and not address.startswith("unix:"):
            typer.launch(link or address)

    def ends(end: "Callable[[], object]") -> None:
        call_at_end(end, "stopped by %s: the dashboard ends")

    serve(places, wanted, ready=ready, ends=ends)
