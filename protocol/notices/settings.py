"""The settings of notices: how an operator is notified, and the thresholds."""

import os
import re
import shlex
import shutil
import stat
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import BaseModel, Field, FieldSerializationInfo, field_serializer, field_validator, model_validator
from pydantic_core import PydanticCustomError

from atoll.ground.faults import Refused
from atoll.ground.folders import in_words
from atoll.protocol.settings import HIDDEN, STRICT, WHOLE, Folder

Away = Annotated[float, Field(ge=1, le=366 * 86400, allow_inf_nan=False)]

PASSWORD_BYTES_MAX = 4096

_MAIL = re.compile(r"[^\s<>,;:\"@\\]+@[A-Za-z0-9.-]+", re.ASCII)
"""Pattern of one mail address without quotes and comments."""


_PATH = re.compile(r"(?<=://)([^/?#]*[/?#]).+", re.DOTALL)
"""Pattern of a URL's host and of the path after it, which may be secret."""

_HIDDEN_PATH = re.compile(r"://[^/?#]*[/?#]\(hidden\)")
"""URL from its host on, after `_without_path` has removed the path."""


class MailServer(NamedTuple):
    """Mail server of `notify.smtp`."""

    is_tls: bool
    """Whether TLS starts with the first byte; else STARTTLS if the server offers it, and always before a password."""
    host: str
    port: int
    user: str


class NotifyConfig(BaseModel, **STRICT):
    """How an operator is notified: by a command, a URL or e-mail; without one of them, only in the log."""

    command: str = ""
    """Command to run, with its arguments, without a shell: it gets the message as JSON on its standard input, and its
    parts in ATOLL_CONDITION, ATOLL_SUBJECT and ATOLL_MESSAGE. An exit code other than 0 is a failure."""

    url: str = ""
    """URL to notify, `https://...` or `http://...`: the message is JSON, sent by POST. Only its host is logged and
    printed, because the path of a webhook is often a secret."""

    mail: str = ""
    """Mail address to notify, over `smtp`; also the sender, unless the user of `smtp` is an address."""

    smtp: str = "smtp://localhost"
    """Mail server: `smtp://HOST:PORT`, `smtps://HOST:PORT` (TLS from the first byte), with a password
    `smtp://USER@HOST:PORT`, where USER may be an address with `%40` for its @."""

    password_file: Folder | None = None
    """File with the password of `smtp`'s user, readable by its owner only (mode 0600); absent: no password."""

    away: Away = 3600.0
    """Seconds after which an absent site, or at an agent the absent coordinator, is reported."""

    disk: int = Field(default=2**30, ge=0, le=2**60)
    """Free bytes on the disk of the state directory below which a notice is sent; 0: never."""

    @property
    def way(self) -> str:
        """Way in words, without secrets; empty: there is none."""
        if self.command:
            return f"the command {shlex.split(self.command)[0]}"
        if self.url:
            found = urlsplit(self.url)
            return f"{found.scheme}://{found.hostname}"
        return f"mail to {self.mail} over {self.server.host}:{self.server.port}" if self.mail else ""

    @property
    def server(self) -> MailServer:
        """Mail server, or None."""
        return _server(self.smtp)

    @field_serializer("url", "command")
    def _without_paths(self, text: str, info: FieldSerializationInfo) -> str:
        """Hide the paths of URLs, which may be secret, from everyone except the owner."""
        if (info.context or {}).get(WHOLE) or "://" not in text:
            return text
        words = shlex.split(text) if info.field_name == "command" else ()
        return shlex.join(map(_without_path, words)) if words else _without_path(text)

    @field_validator("command")
    @classmethod
    def _command_has_words(cls, command: str) -> str:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"{error}; allowed: a program and its arguments, quoted as in a shell") from None
        if "\0" in command or (command and not words):
            raise ValueError("allowed: a program and its arguments")
        return command

    @field_validator("url")
    @classmethod
    def _url_has_a_host(cls, url: str) -> str:
        if not url:
            return url
        found = _split(url)
        if found is None or found.scheme not in ("http", "https") or not found.hostname:
            raise _hidden("allowed: https://HOST/PATH or http://HOST/PATH")
        if not url.isascii():
            raise _hidden("allowed: only ASCII; write another letter as the %XX of its UTF-8, a host as xn--...")
        if found.username is not None or found.password is not None:
            raise _hidden("a user or password in a URL is not sent; allowed: https://HOST/PATH, or a command")
        return url

    @field_validator("mail")
    @classmethod
    def _mail_is_an_address(cls, mail: str) -> str:
        if mail and not _MAIL.fullmatch(mail):
            raise ValueError("allowed: one mail address, such as oncall@example.org")
        return mail

    @field_validator("smtp")
    @classmethod
    def _smtp_is_a_server(cls, smtp: str) -> str:
        found = _split(smtp)
        if found is not None and found.password is not None:
            raise ValueError("the password does not belong here: put it into a file and name it in password_file")
        if found is None or found.scheme not in ("smtp", "smtps") or not found.hostname or found.path.strip("/"):
            raise ValueError("allowed: smtp://HOST:PORT, smtps://HOST:PORT, either with USER@")
        if not unquote(found.username or "").isascii():
            raise ValueError("allowed: a user in ASCII, the only one that can be sent")
        return smtp

    @model_validator(mode="after")
    def _has_one_way(self) -> "NotifyConfig":
        ways = [name for name in ("command", "url", "mail") if getattr(self, name)]
        faults = []
        if len(ways) > 1:
            faults.append(f"{' and '.join(ways)}: allowed: one of command, url and mail; a command can tell several")
        for name in ("smtp", "password_file"):
            if not self.mail and getattr(self, name) != type(self).model_fields[name].default:
                faults.append(f"{name} has no effect without mail: name the address in mail, or leave {name} out")
        if self.password_file is not None and self.mail and not self.server.user:
            faults.append("password_file has no effect without a user: name one in smtp, smtp://USER@HOST:PORT")
        if self.server.user and self.password_file is None:
            faults.append(f"smtp has the user {self.server.user}: name the file of the password in password_file")
        if faults:
            raise Refused(*faults)
        return self


def faults_of_machine(config: NotifyConfig) -> list[str]:
    """List what is missing on this machine: the command, the password file, or a hidden path."""
    faults = []
    if config.command and shutil.which(name := shlex.split(config.command)[0]) is None:
        faults.append(
            f"notify.command: there is no program {name!r} here that this user may run: install it, or chmod +x"
        )
    faults += [
        f"notify.{name}: its path was hidden when these settings were printed: allowed: the whole URL"
        for name in ("url", "command")
        if _HIDDEN_PATH.search(getattr(config, name))
    ]
    if config.password_file is not None:
        try:
            read_password(config.password_file)
        except ValueError as error:
            faults.append(f"notify.password_file: {error}")
    return faults


def read_password(path: Path) -> str:
    """Read the password in a file, for one use.

    Raises:
        ValueError: the file cannot be read, others may read it, or it contains no password; the text says which.
    """
    try:
        with path.open("rb") as file:
            mode, content = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(PASSWORD_BYTES_MAX + 1)
    except OSError as error:
        raise ValueError(in_words(error)) from None
    if mode & 0o077:
        raise ValueError(f"{path} may be read by others (mode {mode:03o}): chmod 600 {path}")
    try:
        password = content.decode("ascii").rstrip("\r\n")  # the only characters that smtplib sends
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not ASCII: allowed: the password in the first line, and nothing else") from None
    if not password or "\n" in password or len(content) > PASSWORD_BYTES_MAX:
        raise ValueError(f"{path} has no password: allowed: the password in the first line, and nothing else")
    return password


def _hidden(message: str) -> PydanticCustomError:
    """Return the error about a URL without the URL: the path of a webhook is often a secret."""
    return PydanticCustomError(HIDDEN, "{message}", {"message": message})


def _without_path(url: str) -> str:
    return _PATH.sub(r"\1(hidden)", url)


def _server(text: str) -> MailServer:
    found = urlsplit(text)
    is_tls = found.scheme == "smtps"
    port = found.port or (465 if is_tls else 587 if found.username else 25)
    return MailServer(is_tls, found.hostname or "", port, unquote(found.username or ""))


def _split(text: str) -> SplitResult | None:
    """Return the parts of a URL; None: it is not a URL."""
    if not text.isprintable() or " " in text:
        return None
    try:
        found = urlsplit(text)
        (found.hostname or "").encode("idna")  # like the connection: a name without an empty or a long label
        return found if found.port is None or found.port > 0 else None
    except ValueError:
        return None
