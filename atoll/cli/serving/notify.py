"""`atoll notify`: send a test message as a coordinator or an agent would."""

import time
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import options
from atoll.cli.printing import as_json, say
from atoll.cli.waiting import waiting_for
from atoll.operations.faults import CommandError

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="TOML of a coordinator, a run or an agent, with a table \\[notify].")
]


def notify(file: File, overrides: options.Set = [], json: options.Json = False) -> None:  # noqa: B006
    """Send a test message by the table `notify` of a coordinator's or an agent's TOML.

    Its condition is `test`. The command ends when the message is delivered, or says why it is not.
    """
    import asyncio

    from pydantic import BaseModel

    from atoll.protocol.notices.delivery import BOUND_S, NotDelivered, deliver_within
    from atoll.protocol.notices.notice import Condition, Notice
    from atoll.protocol.notices.settings import NotifyConfig, faults_of_machine
    from atoll.protocol.notices.teller import Teller, message_of
    from atoll.protocol.settings import STRICT, load

    class Tables(BaseModel):
        """The table [notify] of a TOML whose other keys are of its process."""

        model_config = {**STRICT, "extra": "ignore"}
        site: str = ""
        notify: NotifyConfig = NotifyConfig()

    found = load(Tables, file, overrides)
    config = found.notify
    if not config.way:
        raise CommandError(
            f"{file}: [notify] names no way to deliver: add command, url or mail (`atoll settings coordinator`)"
        )
    if faults := faults_of_machine(config):
        raise CommandError(*faults)
    process = "agent" if found.site else "coordinator"
    sentence = f"this is a test of [notify] in {file.absolute()}: nothing is wrong"
    message = message_of(Teller(process, found.site), Notice(Condition.TEST, "test", sentence), time.time())
    try:
        with waiting_for(config.way, f"up to {2 * BOUND_S:g} s"):
            asyncio.run(deliver_within(config, message))
    except NotDelivered as error:
        raise CommandError(f"{config.way}: {error}") from error
    if json:
        as_json(message)
        return
    say(f"delivered to {config.way}")
