"""The delivery of a message, by a command, a URL or e-mail. It blocks, each step for at most `BOUND_S`."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from typing import Any

from atoll.ground.printable import printable
from atoll.protocol.notices.settings import NotifyConfig, read_password
from atoll.protocol.threads import on_daemon_thread

BOUND_S = 20.0
"""Time limit of a command, or of one step of a connection [s]."""

Message = dict[str, Any]
"""The fields of a line of `--log json`, with `condition`, `subject`, `id` and `host`."""


_running: set[int] = set()
"""Process ids of the running commands, each the leader of its process group."""


class NotDelivered(Exception):
    """Error: a delivery has failed; the text says why, without secrets."""


def deliver(config: NotifyConfig, message: Message) -> None:
    """Deliver a message by the configured way, if there is one.

    Raises:
        NotDelivered: it failed, or its outcome is unknown.
    """
    try:
        if config.command:
            _run(config, message)
        elif config.url:
            _post(config, message)
        elif config.mail:
            _mail(config, message)
    except OSError as error:  # including errors of urllib and smtplib
        raise NotDelivered(_in_words(error)) from error
    except UnicodeError as error:  # from these two libraries, which support only ASCII; the error may contain a secret
        raise NotDelivered("a host, user or password that is not ASCII cannot be sent") from error


async def deliver_within(config: NotifyConfig, message: Message) -> None:
    """Deliver a message as `deliver` does, on a thread that is abandoned after twice `BOUND_S`.

    A receiver that answers one byte at a time would never exceed the limit of a step.

    Raises:
        NotDelivered: it failed, or its outcome is unknown.
    """
    try:
        await asyncio.wait_for(on_daemon_thread(lambda: deliver(config, message)), 2 * BOUND_S)
    except TimeoutError as error:
        raise NotDelivered(f"no end within {2 * BOUND_S:g} s") from error


def end_commands() -> None:
    """Kill the running commands and their children: the process is exiting and would leave them behind."""
    for pid in [*_running]:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _run(config: NotifyConfig, message: Message) -> None:
    parts = {f"ATOLL_{name.upper()}": str(message[name]) for name in ("condition", "subject", "message")}
    with subprocess.Popen(
        shlex.split(config.command),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **parts},
        start_new_session=True,
    ) as process:
        _running.add(process.pid)
        try:
            _, said = process.communicate(_as_json(message), timeout=BOUND_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise NotDelivered(f"it took longer than {BOUND_S:g} s and was ended") from None
        finally:
            _running.discard(process.pid)
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        last = f": {lines[-1][:200]}" if lines else ""
        ended = f"exit code {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
        raise NotDelivered(f"{ended}{last}")


def _post(config: NotifyConfig, message: Message) -> None:
    import http.client  # imported here, as below: a process that notifies in another way, or not at all, imports little
    import urllib.error
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            """Follow no redirect, which would lose the body of a POST."""
            return None

    headers = {"Content-Type": "application/json", "User-Agent": "atoll"}
    request = urllib.request.Request(config.url, _as_json(message), headers, method="POST")
    try:
        with urllib.request.build_opener(NoRedirect).open(request, timeout=BOUND_S):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        raise NotDelivered(f"it answers {error.code} {error.reason}"[:200]) from None
    except http.client.HTTPException as error:
        raise NotDelivered(f"its answer is not HTTP ({type(error).__name__})") from None


def _mail(config: NotifyConfig, message: Message) -> None:
    import smtplib
    import ssl
    from email.message import EmailMessage
    from email.utils import formatdate, make_msgid

    server, mail = config.server, EmailMessage()
    mail["From"] = server.user if "@" in server.user else config.mail
    mail["To"] = config.mail
    mail["Subject"] = f"atoll {message['process']}: {message['condition']}: {printable(message['subject'])}"
    mail["Date"] = formatdate()
    mail["Message-ID"] = make_msgid(message["id"])
    mail["Auto-Submitted"] = "auto-generated"
    content = f"{message['message']}\n\n{json.dumps(message, ensure_ascii=False, indent=1)}\n"
    mail.set_content(content.encode(errors="backslashreplace").decode())
    context = ssl.create_default_context()
    if server.is_tls:
        connection: smtplib.SMTP = smtplib.SMTP_SSL(server.host, server.port, timeout=BOUND_S, context=context)
    else:
        connection = smtplib.SMTP(server.host, server.port, timeout=BOUND_S)
    with connection:
        connection.ehlo()
        if not server.is_tls and (server.user or (connection.has_extn("starttls") and not _is_here(server.host))):
            connection.starttls(context=context)
        if server.user:
            assert config.password_file is not None
            try:
                password = read_password(config.password_file)
            except ValueError as error:
                raise NotDelivered(str(error)) from None
            connection.login(server.user, password)
        connection.send_message(mail)


def _is_here(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1")


def _as_json(message: Message) -> bytes:
    """Return a message as JSON; bytes of a path that are not UTF-8 are escaped."""
    return json.dumps(message, ensure_ascii=False).encode(errors="backslashreplace")


def _in_words(error: OSError) -> str:
    """Return why a delivery has failed, in one line, without a mail server's answer to a login."""
    if (code := getattr(error, "smtp_code", None)) is not None:
        is_login = type(error).__name__ == "SMTPAuthenticationError"
        said = "" if is_login else f" {error.smtp_error!r}"  # type: ignore[attr-defined]
        return f"the mail server {'refuses the user and password' if is_login else 'answers'} ({code}){said}"[:200]
    reason = getattr(error, "reason", error)  # from urllib
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason) or type(reason).__name__
    return " ".join(text.split())[:200]
