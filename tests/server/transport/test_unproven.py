"""The lines about connections that end without a proven identity: one a host, few in all."""

import pytest

from atoll.protocol.identity.names import COORDINATOR
from atoll.server.identity.authority import Authority
from atoll.server.transport.unproven import AGAIN_S, HOSTS_MAX, LINES_BURST, LINES_PER_S, Unproven


@pytest.fixture
def port(tmp_path):
    own = Authority.create(tmp_path / "ca", "test").credential(COORDINATOR)
    return Unproven(lambda: own, lambda: own.leaf.issued_at)


def lines(caplog):
    return caplog.text.count("has proven no identity")


def test_a_host_is_named_once_in_a_while(port, caplog):
    for now in (0.0, 1.0, AGAIN_S - 1.0, AGAIN_S):
        port.tell(("192.0.2.1", 4711), now)
    assert lines(caplog) == 2
    assert "a connection from 192.0.2.1 port 4711 has proven no identity: it did not accept" in caplog.text


def test_strangers_with_many_addresses_do_not_fill_the_log(port, caplog):
    for number in range(HOSTS_MAX + 100):
        port.tell((f"192.0.{number // 256}.{number % 256}", 1), 0.0)
    assert lines(caplog) == LINES_BURST
    port.tell(("198.51.100.1", 1), 1.0 / LINES_PER_S)
    assert lines(caplog) == LINES_BURST + 1


def test_an_own_certificate_that_is_not_valid_is_the_cause(tmp_path, caplog):
    own = Authority.create(tmp_path / "ca", "test").credential(COORDINATOR)
    Unproven(lambda: own, lambda: own.leaf.expires_at + 1.0).tell(("192.0.2.1", 1), 0.0)
    assert "this machine's own certificate, of coordinator main, is valid from" in caplog.text
