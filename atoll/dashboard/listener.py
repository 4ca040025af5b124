"""Listener of a dashboard: its address, and the file by which its owner makes further links to one on loopback."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from atoll.dashboard.access import LOGIN, new_token
from atoll.ground.address import bracketed, is_address, is_loopback, parsed
from atoll.interface.errors import AtollError

DEFAULT = "127.0.0.1:7080"

TUNNEL = "use a tunnel: ssh -L 7080:127.0.0.1:7080 HOST, with `atoll dashboard` on HOST"


@dataclass(frozen=True)
class Listener:
    """An address.

    Args:
        host: an address or a name of this machine.
        port: the port; 0: a free one.
    """

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether this machine alone reaches it."""
        return is_loopback(self.host)

    @property
    def netloc(self) -> str:
        """The address as a URL has it."""
        return self._netloc_of(self.host)

    @property
    def hosts(self) -> set[str]:
        """The values of `Host` that name it: a name that resolves to loopback is another page's (DNS rebinding)."""
        return {self.netloc, self._netloc_of("localhost")}

    @property
    def cookie(self) -> str:
        """The name of its cookie: browsers keep one jar for all ports of a host."""
        return f"atoll-{self.port}"

    def url(self, token: str) -> str:
        """Return the link with a token."""
        return f"http://{self.netloc}{LOGIN}?t={token}"

    def _netloc_of(self, host: str) -> str:
        return bracketed(host) if self.port == 80 else f"{bracketed(host)}:{self.port}"


def listener_of(text: str) -> Listener:
    """Return the address that `--listen` names.

    Raises:
        AtollError: it is no address; the message says what is allowed.
    """
    try:
        host, port = parsed(text)
    except ValueError:
        fault = f"--listen: got {text!r}; allowed: unix:PATH, or HOST:PORT, such as {DEFAULT}, port 0..65535"
        raise AtollError(fault) from None
    if host == "localhost":
        return Listener("127.0.0.1", port)
    return Listener(str(ip_address(host)) if is_address(bracketed(host)) else host, port)


def bound(listener: Listener) -> tuple[socket.socket, Listener]:
    """Return the listening socket, and the address with its port.

    Raises:
        AtollError: the port is in use, or the address does not exist here.
    """
    try:
        family, *_, at = socket.getaddrinfo(listener.host, listener.port, type=socket.SOCK_STREAM)[0]
        found = socket.create_server(at[:2], family=family)
    except OSError as error:
        why = error.strerror or str(error)
        raise AtollError(
            f"--listen: got {listener.netloc!r}: {why}; name another port, or 0 for a free one (if a dashboard listens "
            "there already, `atoll dashboard link` prints a link)"
        ) from None
    return found, Listener(listener.host, found.getsockname()[1])


def runtime_folder() -> Path:
    """Return the folder of the files of running dashboards, which its owner alone can read; it is made.

    Raises:
        AtollError: it belongs to another user, or cannot be made.
    """
    place = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(place) if place else Path.home() / ".cache") / "atoll" / "dashboards"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except (OSError, RuntimeError) as error:
        raise AtollError(
            f"the folder of running dashboards cannot be made: {error}: set XDG_RUNTIME_DIR to a folder of yours"
        ) from None
    return folder


@contextmanager
def announced(listener: Listener, key: bytes, folder: Path) -> Iterator[None]:
    """Leave the key of links in a file for the owner of this process, as long as the block runs.

    Args:
        listener: where this process listens.
        key: the key that signs links.
        folder: the folder of these files.
    """
    path = folder / f"{listener.host.replace(':', '_')}-{listener.port}.json"
    document = {"pid": os.getpid(), "host": listener.host, "port": listener.port, "key": key.hex()}
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(document, file)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()


def another_link(listen: str, folder: Path, now: float) -> str:
    """Return another link to a running dashboard of this user.

    Args:
        listen: its address; empty: the only one that runs.
        folder: the folder of the files of running dashboards.
        now: the time [s since the epoch].

    Raises:
        AtollError: none runs, or several do and none is named.
    """
    if listen.startswith("unix:"):
        raise AtollError("a dashboard at a Unix socket has no link: its proxy lets its users in")
    running = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found = json.loads(path.read_text("utf-8"))
            os.kill(int(found["pid"]), 0)
            running[Listener(str(found["host"]), int(found["port"]))] = bytes.fromhex(found["key"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    wanted = listener_of(listen) if listen else None
    chosen = [one for one in running if wanted in (None, one)]
    if len(chosen) == 1:
        return chosen[0].url(new_token(running[chosen[0]], now))
    listed = ", ".join(one.netloc for one in running) or "none"
    if chosen:
        raise AtollError(f"several dashboards of yours run here ({listed}): name one with --listen HOST:PORT")
    where = f" at {listen}" if listen else ""
    raise AtollError(f"no dashboard of yours runs here{where} (running: {listed}): start one with `atoll dashboard`")
