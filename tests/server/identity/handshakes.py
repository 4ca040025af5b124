"""Strangers and members dial a coordinator's two ports, many at once, while its certificate is renewed.

    python -m tests.server.identity.handshakes SECONDS

Prints how many strangers and how many members were answered, and how many certificates were shown.
"""

import asyncio
import ssl
import sys
import tempfile
import time
from pathlib import Path

from atoll.protocol.identity.names import COORDINATOR
from tests.server.identity.test_enrolments import enrol, house
from tests.waiting import BOUND_S

CROWD = 20


async def dial(address: str) -> str:
    """Return the certificate that the port shows to a caller without one."""
    host, _, port = address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=BOUND_S)


async def main(seconds: float) -> None:
    """See the module docstring."""
    shown, num_members, num_strangers = set(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        async with house(Path(folder) / "state") as at:
            mine = await enrol(await at.invite(), Path(folder) / "me")
            until = time.monotonic() + seconds

            async def call() -> None:
                async with at.channel(mine) as channel:
                    await asyncio.wait_for(channel.channel_ready(), 30)

            async def replaced() -> None:
                while True:
                    await asyncio.sleep(0.25)
                    at.keeper.replace(at.enrolments._signer.credential(COORDINATOR))

            replacing = asyncio.ensure_future(replaced())
            while time.monotonic() < until:
                strangers = asyncio.gather(*(dial(at.port.address) for _ in range(CROWD)))
                members = asyncio.gather(*(call() for _ in range(CROWD)))
                shown.update(await strangers)
                await members
                num_strangers, num_members = num_strangers + CROWD, num_members + CROWD
            replacing.cancel()
    print(num_strangers, num_members, len(shown))


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
