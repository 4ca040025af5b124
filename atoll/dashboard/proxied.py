"""The listener behind a proxy: a Unix socket, the proxy's header of the user, and the file of the users' roles.

Every process that may connect can name any user, so the mode of the socket is the protection: its owner alone connects,
or with a umask of 007 its group. The header counts at this listener alone.
"""

import errno
import os
import re
import socket
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.dashboard.access import Headers, Refused, Scope, Visitor
from atoll.ground.printable import printable
from atoll.interface.errors import AtollError

SCHEME = "unix:"

ROLES = ("owner", "operator", "auditor")
"""The roles of users."""

PATH_BYTES_MAX = 107
"""Largest size of the path of a socket (`sun_path` of Linux)."""

FILE_BYTES_MAX = 1024 * 1024
"""Largest size of the file of users."""

_NAME = re.compile(r"[A-Za-z0-9-]+", re.ASCII)
_TAKEN = ("host", "origin", "cookie", "content-type", "content-length", "transfer-encoding", "connection")

FORM = 'hosts = ["fl.example.org"], and a table [users] with lines such as "olga@example.org" = "operator"'


@dataclass(frozen=True)
class Known:
    """What the file of users says.

    Args:
        hosts: the values of `Host` by which browsers reach the proxy.
        roles: the role of each user.
    """

    hosts: frozenset[str]
    roles: Mapping[str, str]


class Users:
    """The users of a proxy, read again when their file changes.

    Args:
        path: the file.

    Raises:
        AtollError: the file cannot be read, others may change it, or it has faults.
    """

    def __init__(self, path: str) -> None:
        if not path or "\0" in path:
            raise AtollError(
                f"--users: got {printable(path)!r}; allowed: a file, for a listener at a Unix socket: {FORM}"
            )
        self._path = Path(path)
        self._state: tuple[int, ...] = ()
        self._known = Known(frozenset(), {})
        self.known()

    def known(self) -> Known:
        """Return what the file says now; raises AtollError."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                state = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
                if state == self._state:
                    return self._known
                self._state = ()
                if not stat.S_ISREG(found.st_mode) or found.st_size > FILE_BYTES_MAX:
                    raise AtollError(f"--users: {self._path} is no file of at most {FILE_BYTES_MAX} bytes")
                if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
                    raise AtollError(f"--users: others may change {self._path}: chmod go-w it, as its owner")
                self._known, self._state = known_in(file.read()), state
        except OSError as error:
            self._state = ()
            raise AtollError(f"--users: {self._path} cannot be read: {error.strerror}") from None
        return self._known


def known_in(content: bytes) -> Known:
    """Return what a file of users says.

    Raises:
        AtollError: it has faults; the message has all of them.
    """
    try:
        document = tomllib.loads(content.decode())
    except ValueError as error:
        raise AtollError(f"--users: no TOML: {printable(str(error))}; allowed: {FORM}") from None
    hosts, users = document.pop("hosts", []), document.pop("users", {})
    faults = [f"--users: {printable(name)} is unknown; allowed: {FORM}" for name in document]
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        faults.append('--users: hosts: allowed: the names of the proxy in browsers, such as ["fl.example.org"]')
    if not isinstance(users, dict) or not users:
        faults.append(f"--users: users: allowed: {FORM}")
    else:
        wrong = [name for name, role in users.items() if role not in ROLES]
        faults += [f"--users: {printable(name)}: allowed: one of {', '.join(ROLES)}" for name in wrong]
    if faults:
        raise AtollError(*faults)
    return Known(frozenset(host.lower() for host in hosts), users)


def header_of(name: str) -> str:
    """Return the header of the user in lower case.

    Raises:
        AtollError: no header can have this name, or it has another meaning.
    """
    found = name.lower()
    if not _NAME.fullmatch(name) or found in _TAKEN:
        raise AtollError(
            f"--user-header: got {printable(name)!r}; allowed: the header in which the proxy names its user, such as "
            "X-Forwarded-User"
        )
    return found


class ProxyDoor:
    """Door for browsers behind a proxy, which has authenticated their users.

    Args:
        users: the users and their roles.
        header: the header with the name of the user, in lower case.
    """

    def __init__(self, users: Users, header: str) -> None:
        self._users, self._header = users, header

    def origins(self, host: str) -> list[str]:
        """Return the origins of the pages at a host: the proxy knows whether it has TLS."""
        return [f"https://{host}", f"http://{host}"]

    def check_host(self, host: str) -> None:
        """Check a value of `Host`, which the proxy must pass on; raises Refused."""
        if host not in self._known().hosts:
            raise Refused(
                f"{printable(host)[:80]!r} is no address of the dashboard: `hosts` in --users does not name it"
            )

    async def visitor(self, scope: Scope, headers: Headers) -> Visitor:
        """Return the user that the proxy names; raises Refused."""
        sent = [value.encode("latin-1") for name, value in headers if name == self._header]
        if len(sent) != 1 or not sent[0]:
            raise Refused(f"the proxy must name one user, in the header {self._header}")
        name = sent[0].decode("utf-8", "replace")
        if (role := self._known().roles.get(name)) is None:
            raise Refused(f"{printable(name)[:80]} has no role here: the file of the users does not have this name")
        return Visitor(b"user " + sent[0], name, role)

    def _known(self) -> Known:
        try:
            return self._users.known()
        except AtollError as error:
            raise Refused(
                "the file of the users has a fault, which the log of the dashboard's start would show"
            ) from error


def path_of(listen: str) -> Path:
    """Return the path of `unix:PATH`.

    Raises:
        AtollError: it is no path that a socket can have.
    """
    path = listen.removeprefix(SCHEME)
    if not path or "\0" in path or len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise AtollError(f"--listen: got {printable(listen)!r}; allowed: unix:PATH, of at most {PATH_BYTES_MAX} bytes")
    return Path(path)


@contextmanager
def listening_at(path: Path) -> Iterator[socket.socket]:
    """Listen on a Unix socket, which its owner may use, and with a umask such as 007 its group; it is removed.

    Args:
        path: the path of the socket; a stale one of this user is replaced.

    Raises:
        AtollError: something else is there, another process listens, or others may replace files in the folder.
    """
    _check_folder(path)
    _remove_stale(path)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        umask = os.umask(0o177)
        try:
            found.bind(os.fspath(path))
        finally:
            os.umask(umask)
        inode = path.lstat().st_ino
        try:
            if not umask & 0o060:
                path.chmod(0o660)
            found.listen()
            yield found
        finally:
            with suppress(OSError):
                if path.lstat().st_ino == inode:
                    path.unlink()
    except OSError as error:
        raise AtollError(f"--listen: got unix:{path}: {error.strerror or error}") from None
    finally:
        found.close()


def _check_folder(path: Path) -> None:
    folder = path.absolute().parent
    try:
        found = folder.stat()
    except OSError as error:
        raise AtollError(f"--listen: got unix:{path}: {folder}: {error.strerror}") from None
    others_write = found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX
    if others_write or found.st_uid not in (0, os.geteuid()):
        raise AtollError(f"--listen: got unix:{path}: others may replace files in {folder}: name a folder of yours")


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that has ended; raises AtollError."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise AtollError(f"--listen: got unix:{path}: {error.strerror}") from None
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise AtollError(f"--listen: got unix:{path}, where something else is: name another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                path.unlink(missing_ok=True)
                return
    raise AtollError(f"--listen: got unix:{path}: another process listens there: stop it, or name another path")
