"""`atoll chaos`: drills for a federation of your own machine, a line with troubles and kills of a process."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli.printing import as_json_line
from atoll.operations.faults import CommandError

app = typer.Typer(no_args_is_help=True, help="Drills: a line with troubles, and kills of a process.")

Seed = Annotated[int, typer.Option(metavar="N", help="Seed of all draws: the same one has the same troubles again.")]


@app.command()
def proxy(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the line begins; port 0: any free one.")],
    to: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where it ends, such as a coordinator.")],
    latency: Annotated[float, typer.Option(metavar="SECONDS", help="Delay in each direction.")] = 0.0,
    jitter: Annotated[float, typer.Option(metavar="SECONDS", help="Largest further delay.")] = 0.0,
    rate: Annotated[float, typer.Option(metavar="BYTES/S", help="Rate in each direction; 0: no limit.")] = 0.0,
    cut_every: Annotated[float, typer.Option(metavar="SECONDS", help="Mean time between two cuts; 0: none.")] = 0.0,
    half_open: Annotated[float, typer.Option(metavar="SHARE", help="Share of cuts that neither end is told.")] = 0.0,
    seed: Seed = 0,
    anywhere: Annotated[bool, typer.Option("--anywhere", help="Allow addresses of other machines.")] = False,
) -> None:
    """Forward connections over a line with troubles, until a signal comes; print what the line does, a JSON line each.

    Give agents the address of the line in place of the coordinator's: the coordinator's certificate must name its host.
    """
    import asyncio

    from atoll.drills.line import Line
    from atoll.drills.troubles import Troubles
    from atoll.ground.address import bracketed

    troubles = Troubles(
        latency_s=latency, jitter_s=jitter, rate=rate, cut_every_s=cut_every, half_open=half_open, seed=seed
    )
    faults = troubles.faults()
    places = [place for each in (listen, to) if (place := _place(each, anywhere, faults)) is not None]
    if faults:
        raise CommandError(*faults)
    (host, port), target = places
    line = Line(target, troubles, _say)
    try:
        listening = line.listening(host, port)
    except OSError as error:
        raise CommandError(f"--listen {listen}: {error.strerror}: choose another port") from None
    _say("listening", address=f"{bracketed(host)}:{listening.getsockname()[1]}", to=to)
    asyncio.run(line.serve(listening))


@app.command()
def kill(
    pidfile: Annotated[Path, typer.Option(metavar="FILE", help="File with a process's number, read each time.")],
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Mean time between two kills.")],
    for_: Annotated[float, typer.Option("--for", metavar="SECONDS", help="Time of the drill.")],
    seed: Seed = 0,
) -> None:
    """Kill (SIGKILL) the process that a file names again and again; print each kill as a JSON line.

    What starts the process again, as a supervisor does, writes the file again. A process that has begun after the file
    was written is another one with the same number, and is left alone.
    """
    import math

    from atoll.drills.kills import kill_again_and_again

    faults = [
        f"{name} {value:g}: allowed: seconds above 0, and finite"
        for name, value in (("--every", every), ("--for", for_))
        if not 0 < value < math.inf
    ]
    if faults:
        raise CommandError(*faults)
    killed = kill_again_and_again(pidfile, every_s=every, for_s=for_, seed=seed, on_event=_say)
    _say("done", killed=killed)


def _place(address: str, anywhere: bool, faults: list[str]) -> tuple[str, int] | None:
    """Return host and port of an address, or add why it is not allowed to the faults."""
    from atoll.ground.address import is_loopback
    from atoll.protocol.settings import ConfigError
    from atoll.protocol.wire.channel import parse_address

    try:
        host, port = parse_address(address)
    except ConfigError as error:
        faults.extend(error.faults)
        return None
    if not anywhere and not is_loopback(host):
        faults.append(f"address {address!r}: allowed: 127.0.0.1, localhost or [::1], or any with --anywhere")
        return None
    return host, port


def _say(did: str, **details: Any) -> None:
    as_json_line({"at": round(time.time(), 3), "did": did, **details})
