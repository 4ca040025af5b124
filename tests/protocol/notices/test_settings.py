"""The settings of notices: one way, sound addresses, secrets outside of them."""

import tomllib

import pytest
from pydantic import BaseModel

from atoll.protocol.notices.settings import MailServer, NotifyConfig, faults_of_machine, read_password
from atoll.protocol.settings import STRICT, ConfigError, effective, load_text


class File(BaseModel, **STRICT):
    notify: NotifyConfig = NotifyConfig()


def faults(text):
    with pytest.raises(ConfigError) as caught:
        load_text(File, f"[notify]\n{text}", name="a.toml")
    return "\n".join(caught.value.faults)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('urls = "https://h/x"', "notify.urls: unknown key (did you mean url?"),
        ('command = "true"\nurl = "https://h/x"', "command and url: allowed: one of command, url and mail"),
        ('command = "true"\nurl = "https://h"\nmail = "a@b.c"', "command and url and mail: allowed: one"),
        ('url = "ftp://h/x"', "allowed: https://HOST/PATH"),
        ('url = "hooks.example.org"', "allowed: https://HOST/PATH"),
        ('url = "https:///x"', "allowed: https://HOST/PATH"),
        ('url = "https://h:99999/x"', "allowed: https://HOST/PATH"),
        ('url = "https://h/a b"', "allowed: https://HOST/PATH"),
        ('url = "https://h/\u00e4"', "write another letter as the %XX of its UTF-8"),
        ('url = "https://b\u00fccher.example/x"', "a host as xn--"),
        ('url = "https://a..b/x"', "allowed: https://HOST/PATH"),
        ('mail = "a@b.c"\nsmtp = "smtp://a..b"', "allowed: smtp://HOST:PORT"),
        ('mail = "a@b.c"\nsmtp = "smtp://\u00fc@h"', "allowed: a user in ASCII"),
        ('command = "tell\\u0000me"', "allowed: a program and its arguments"),
        ('command = "tell \'me"', "No closing quotation"),
        ('command = " "', "allowed: a program and its arguments"),
        ('mail = "oncall"', "allowed: one mail address"),
        ('mail = "a@b.c, d@e.f"', "allowed: one mail address"),
        ('mail = "a@b.c\\nBcc: x@y.z"', "allowed: one mail address"),
        ('mail = "a@b.c"\nsmtp = "mail.example.org"', "allowed: smtp://HOST:PORT"),
        ('smtp = "smtp://h"', "smtp has no effect without mail"),
        ('mail = "a@b.c"\nsmtp = "smtp://me@h"', "name the file of the password in password_file"),
        ('mail = "a@b.c"\npassword_file = "p"', "password_file has no effect without a user"),
        ("away = 0", "notify.away: got 0; allowed: number"),
        ("disk = -1", "notify.disk: got -1"),
    ],
)
def test_a_wrong_table_is_named_with_what_is_allowed(text, said):
    assert said in faults(text)


@pytest.mark.parametrize("key", ["url", "smtp"])
def test_a_password_in_an_address_is_refused_and_not_repeated(key):
    scheme, mail = ("https", "") if key == "url" else ("smtp", 'mail = "a@b.c"')
    said = faults(f'{mail}\n{key} = "{scheme}://me:geheim@h/"')
    assert "password" in said
    assert "geheim" not in said


@pytest.mark.parametrize("url", ["htps://h/s3cret", "https://h:99999/s3cret", "https://h/s3cret-\u00e4"])
def test_the_path_of_a_wrong_url_is_not_repeated(url):
    """It was in the refusal, and so in the journal of the service: the path of a webhook is a secret."""
    said = faults(f'url = "{url}"')
    assert "notify.url: allowed: " in said
    assert "s3cret" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('url = "https://hooks.example.org:8443/T0/s3cret?key=s3cret"', "https://hooks.example.org:8443/(hidden)"),
        ('url = "http://h?s3cret"', "http://h?(hidden)"),
        ('url = "http://h#s3cret"', "http://h#(hidden)"),
        ('url = "https://h/"', "https://h/"),
        ('url = "https://h"', "https://h"),
        ('command = "curl -d @- https://h/s3cret"', "curl -d @- 'https://h/(hidden)'"),
        ("""command = 'sh -c "curl --url=https://h/a?s3cret b"'""", "sh -c 'curl --url=https://h/(hidden)'"),
        ('command = "true  --team  fl"', "true  --team  fl"),
    ],
)
def test_printed_settings_have_no_path_of_a_url_and_load_again(text, said):
    """The unit's `ExecStartPre` wrote the path of the webhook, which is its secret, into the journal."""
    file = load_text(File, f"[notify]\n{text}", name="")
    printed = effective(file)
    notify = tomllib.loads(printed)["notify"]
    assert (notify["url"] or notify["command"]) == said
    assert "s3cret" not in printed
    assert effective(load_text(File, printed, name="")) == printed
    assert load_text(File, effective(file, whole=True), name="") == file


def test_a_path_that_was_hidden_when_it_was_printed_tells_nobody():
    for text in ('url = "https://h/s3cret"', 'command = "true https://h/s3cret"'):
        file = load_text(File, f"[notify]\n{text}", name="")
        assert faults_of_machine(file.notify) == []
        fault = f"notify.{text.split(' ')[0]}: its path was hidden when these settings were printed: allowed: the whole"
        [said] = faults_of_machine(load_text(File, effective(file), name="").notify)
        assert said.startswith(fault)


def test_the_way_has_no_secret():
    def way(text):
        return load_text(File, f"[notify]\n{text}", name="").notify.way

    assert way("") == ""
    assert way('url = "https://hooks.example.org/services/T0/secret?key=1"') == "https://hooks.example.org"
    assert way('command = "/usr/bin/tell --token secret"') == "the command /usr/bin/tell"
    assert way('mail = "a@b.c"') == "mail to a@b.c over localhost:25"
    assert "disk" in effective(File())


@pytest.mark.parametrize(
    ("smtp", "server"),
    [
        ("smtp://h", MailServer(False, "h", 25, "")),
        ("smtps://h", MailServer(True, "h", 465, "")),
        ("smtp://me%40b.c@h", MailServer(False, "h", 587, "me@b.c")),
        ("smtps://me@h:4650", MailServer(True, "h", 4650, "me")),
    ],
)
def test_a_mail_server(smtp, server):
    user = 'password_file = "p"' if server.user else ""
    text = f'[notify]\nmail = "a@b.c"\nsmtp = "{smtp}"\n{user}'
    assert load_text(File, text, name="").notify.server == server


def test_a_command_that_is_not_there_is_a_fault_of_the_machine():
    assert "no program 'atoll-no-such'" in "".join(faults_of_machine(NotifyConfig(command="atoll-no-such --x")))
    assert faults_of_machine(NotifyConfig(command="true")) == []


def test_a_password_is_read_from_a_private_file_alone(tmp_path):
    path = tmp_path / "password"
    config = NotifyConfig(mail="a@b.c", smtp="smtp://me@h", password_file=path)
    assert "there is no" in faults_of_machine(config)[0]
    path.write_text("geheim\n")
    path.chmod(0o640)
    assert faults_of_machine(config) == [
        f"notify.password_file: {path} may be read by others (mode 640): chmod 600 {path}"
    ]
    path.chmod(0o600)
    assert faults_of_machine(config) == []
    assert read_password(path) == "geheim"
    for content in (b"", b"\n", b"a\nb\n", b"\xff", b"x" * 5000):
        path.write_bytes(content)
        assert "allowed: the password in the first line" in faults_of_machine(config)[0]
