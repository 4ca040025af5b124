"""The delivery of a message by a command, a URL and a mail, to real receivers on loopback."""

import asyncio
import json
import logging
import sys
import threading
import time
from contextlib import suppress

import pytest

from atoll.cli.log import _Json
from atoll.protocol.notices import delivery
from atoll.protocol.notices.delivery import NotDelivered, deliver
from atoll.protocol.notices.notice import Condition, Notice
from atoll.protocol.notices.settings import NotifyConfig
from atoll.protocol.notices.teller import Teller, message_of
from tests.protocol.notices.receivers import http_server, mail_server

MESSAGE = message_of(Teller("coordinator"), Notice(Condition.AWAY, "north", "site north is away"), 1_800_000_000.25)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_a_message_has_the_fields_of_a_line_of_the_log():
    record = logging.makeLogRecord({"levelname": "INFO", "name": "atoll", "msg": "x", "run": "r-1"})
    line = json.loads(_Json("agent", "north").format(record))
    notice = Notice(Condition.RUN_FAILED, "r-1", "run r-1 is failed", run="r-1")
    message = message_of(Teller("agent", "north"), notice, 1_800_000_000.25)
    assert line.keys() <= message.keys()
    assert message.keys() - line.keys() == {"condition", "subject", "id", "host"}
    assert message["time"] == "2027-01-15T08:00:00.250Z"
    assert (message["level"], message["process"], message["site"]) == ("error", "agent", "north")
    assert message["id"] == message_of(Teller("agent", "north"), notice, 1_800_000_000.25)["id"]


def test_a_command_gets_json_and_variables(tmp_path):
    out = tmp_path / "out"
    script = tmp_path / "tell.py"
    names = "ATOLL_CONDITION", "ATOLL_SUBJECT", "ATOLL_MESSAGE"
    script.write_text(
        "import json, os, sys\n"
        f"found = [json.load(sys.stdin), sys.argv[1:], [os.environ[n] for n in {names!r}]]\n"
        f"open({str(out)!r}, 'w').write(json.dumps(found))\n"
    )
    deliver(NotifyConfig(command=f"{sys.executable} {script} 'an argument'"), MESSAGE)
    assert json.loads(out.read_text()) == [MESSAGE, ["an argument"], ["away", "north", "site north is away"]]


def test_a_command_that_fails_is_named_with_its_last_line():
    with pytest.raises(NotDelivered, match=r"^exit code 3: no line$"):
        deliver(NotifyConfig(command="sh -c 'echo no line >&2; exit 3'"), MESSAGE)
    with pytest.raises(NotDelivered, match=r"^signal 9"):
        deliver(NotifyConfig(command="sh -c 'kill -9 $$'"), MESSAGE)


def test_a_command_that_hangs_is_ended_with_its_children(monkeypatch):
    monkeypatch.setattr(delivery, "BOUND_S", 0.3)
    begun = time.monotonic()
    with pytest.raises(NotDelivered, match=r"longer than 0\.3 s"):
        deliver(NotifyConfig(command="sh -c 'sleep 600 & sleep 600'"), MESSAGE)
    assert time.monotonic() - begun < 60


def test_a_command_that_reads_nothing_is_fine():
    deliver(NotifyConfig(command="true"), MESSAGE)


def test_a_url_gets_json_by_post():
    with http_server() as server:
        deliver(NotifyConfig(url=server.url), MESSAGE)
        assert server.bodies == [MESSAGE]
        assert server.heads[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize("status", [302, 404, 500])
def test_another_answer_is_a_failure_without_the_secret_of_the_url(status):
    with http_server(status=status) as server:
        with pytest.raises(NotDelivered, match=f"it answers {status}") as caught:
            deliver(NotifyConfig(url=server.url), MESSAGE)
        assert "secret" not in str(caught.value)


def test_a_url_that_nobody_answers():
    with http_server() as server:
        url = server.url
    with pytest.raises(NotDelivered, match="refused") as caught:
        deliver(NotifyConfig(url=url), MESSAGE)
    assert "secret" not in str(caught.value)


def test_a_mail_has_the_sentence_first():
    with mail_server() as server:
        deliver(NotifyConfig(mail="oncall@example.org", smtp=f"smtp://{server.address}"), MESSAGE)
    [(sender, receiver, text)] = server.mails
    assert (sender, receiver) == ("oncall@example.org", "oncall@example.org")
    head, _, body = text.replace("\r\n", "\n").partition("\n\n")
    assert "Subject: atoll coordinator: away: north" in head
    assert body.startswith("site north is away\n")
    assert json.loads(body.partition("\n\n")[2]) == MESSAGE


def test_a_refused_mail_is_a_failure():
    with mail_server(refuses=True) as server, pytest.raises(NotDelivered, match=r"refused|550"):
        deliver(NotifyConfig(mail="oncall@example.org", smtp=f"smtp://{server.address}"), MESSAGE)
    assert server.mails == []


def test_a_password_is_sent_over_tls_alone(tmp_path):
    """A server without STARTTLS never sees it."""
    path = tmp_path / "password"
    path.write_text("geheim")
    path.chmod(0o600)
    with mail_server() as server:
        config = NotifyConfig(mail="a@b.c", smtp=f"smtp://me@{server.address}", password_file=path)
        with pytest.raises(NotDelivered, match=r"(?i)starttls"):
            deliver(config, MESSAGE)
    assert server.mails == []


def test_what_is_not_ascii_is_a_failure_and_no_crash(tmp_path):
    """The process that tells relies on `deliver`: any other error ended the coordinator."""
    path = "/var/lib/\udcff\n"  # bytes that are no UTF-8, as Python reads them
    message = {**MESSAGE, "subject": path, "message": f"the disk of {path} has 1 GB free"}
    with http_server() as server:
        deliver(NotifyConfig(url=server.url), message)
        assert server.bodies == [message]
    with mail_server() as server:
        deliver(NotifyConfig(mail="oncall@example.org", smtp=f"smtp://{server.address}"), message)
        assert "away" in server.mails[0][2]
    deliver(NotifyConfig(command="true"), message)
    odd = NotifyConfig.model_construct(url="http://127.0.0.1:1/\u00e4-secret")
    with pytest.raises(NotDelivered, match="not ASCII") as caught:
        deliver(odd, MESSAGE)
    assert "secret" not in str(caught.value)


def test_a_receiver_that_answers_a_byte_at_a_time_is_left(monkeypatch):
    monkeypatch.setattr(delivery, "BOUND_S", 0.5)
    ended = threading.Event()

    def drip(reply):
        with suppress(OSError):
            while not ended.wait(0.05):
                reply.wfile.write(b"x")

    with http_server(reply=drip) as server:
        with pytest.raises(NotDelivered, match=r"no end within 1 s"):
            asyncio.run(delivery.deliver_within(NotifyConfig(url=server.url), MESSAGE))
        ended.set()
