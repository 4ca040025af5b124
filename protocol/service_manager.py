"""The service manager that started this process: systemd, if its unit says Type=notify."""

import os
from contextlib import suppress

READY, STOPPING = "READY=1", "STOPPING=1"


def tell(state: str, status: str = "") -> None:
    """Report the state of this process, and one line for `systemctl status`, to the service manager if there is one.

    The protocol is sd_notify(3): a datagram to the socket that NOTIFY_SOCKET names.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    import socket  # imported here: a command that computes nothing imports little

    place = "\0" + address[1:] if address.startswith("@") else address
    text = f"{state}\nSTATUS={status}" if status else state
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(text.encode(), place)
