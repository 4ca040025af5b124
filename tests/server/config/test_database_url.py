import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from atoll.protocol.secrets import without_password
from atoll.protocol.settings import ConfigError, effective, load_text
from atoll.server.config.database_url import check_url
from atoll.server.config.process import CoordinatorConfig, HostFile

GOOD = [
    "postgresql://atoll@db.example.org/atoll",
    "postgres://atoll:a%40b@db.example.org:5432/atoll?sslmode=verify-full",
    "postgresql:///atoll?host=/run/postgresql",
    "postgresql://h1:5432,h2:5433/atoll?target_session_attrs=read-write",
    "postgresql://u@[::1]:5432/atoll",
]


@pytest.mark.parametrize("url", ["", *GOOD])
def test_what_libpq_reads_is_taken_as_it_is(url):
    assert check_url(url) == url
    if url:
        assert conninfo_to_dict(url)["dbname"] == "atoll"


@pytest.mark.parametrize(
    "url",
    [
        "mysql://u:hidden@h/d",
        "h/d",
        "postgresql://u:hid@den@h/d",
        "postgresql://u:hid/den@h/d",
        "postgresql://u:hid:den@h/d",
        "postgresql://u:hidden@h:port/d",
        "postgresql://u:hid den@h/d",
        "postgresql://u:hidden\n@h/d",
    ],
)
def test_what_it_would_not_read_as_it_was_meant_is_refused_without_the_password(url):
    with pytest.raises(ValueError, match=r"allowed|must be written as") as fault:
        check_url(url)
    assert "hid" not in str(fault.value)
    with pytest.raises(ConfigError) as faults:
        load_text(HostFile, f"[coordinator]\ndatabase = {json.dumps(url)}", name="run.toml")
    assert "run.toml: coordinator.database" in str(faults.value)
    assert "hid" not in str(faults.value)
    assert "den@" not in str(faults.value)


def test_the_settings_are_shown_without_the_password():
    shown = effective(CoordinatorConfig(database="postgresql://u:hidden@h/d"))
    assert 'database = "postgresql://u@h/d"' in shown


@given(
    st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1).filter(lambda word: "@" not in word)
)
def test_a_password_in_a_url_is_told_to_nobody(password):
    secret = f"<{password}>"
    assert secret not in without_password(f"cannot reach postgresql://user:{secret}@host/db: refused")
    assert without_password(f"postgresql://user:{secret}@host:1/db") == "postgresql://user@host:1/db"


def test_a_password_among_the_parameters_is_told_to_nobody_either():
    assert without_password("postgresql:///d?password=x&user=u") == "postgresql:///d?user=u"
    assert without_password("postgresql:///d?user=u&password=x") == "postgresql:///d?user=u"
    assert without_password("postgresql:///d?a=b&sslpassword=x&user=u") == "postgresql:///d?a=b&user=u"
    assert without_password("postgresql://h/d") == "postgresql://h/d"
