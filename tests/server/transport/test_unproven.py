"""The lines about connections that end without a proven identity."""

import logging

import pytest

from atoll.protocol.identity.names import COORDINATOR
from atoll.server.identity.authority import Authority
from atoll.server.transport.handshakes import FailedHandshake, Report
from atoll.server.transport.unproven import Unproven

ONE = {"192.0.2.1": 1}


@pytest.fixture
def own(tmp_path):
    return Authority.create(tmp_path / "ca", "test").credential(COORDINATOR)


def report(kind, hosts=ONE, seconds=0.0):
    return Report(kind, hosts, 0, ("192.0.2.1", 4711), seconds)


def test_a_refused_connection_is_a_warning_that_names_this_machines_clock(own, caplog):
    Unproven(lambda: own, lambda: own.leaf.issued_at).tell(report(FailedHandshake.REFUSED))
    assert "a connection from 192.0.2.1 port 4711 has proven no identity: it did not accept" in caplog.text


def test_the_line_about_many_names_the_hosts_with_most(own, caplog):
    hosts = {f"192.0.2.{number}": number + 1 for number in range(9)}
    Unproven(lambda: own, lambda: own.leaf.issued_at).tell(report(FailedHandshake.REFUSED, hosts, 600.0))
    assert "45 connections in 10 min 0 s (192.0.2.8: 9, 192.0.2.7: 8, " in caplog.text
    assert "192.0.2.4: 5, and 4 more hosts) have proven no identity" in caplog.text


def test_a_late_connection_is_no_warning(own, caplog):
    caplog.set_level(logging.INFO)
    Unproven(lambda: own, lambda: own.leaf.issued_at).tell(report(FailedHandshake.LATE))
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "no alarm" in caplog.text


def test_an_own_certificate_that_is_not_valid_is_the_cause(own, caplog):
    Unproven(lambda: own, lambda: own.leaf.expires_at + 1.0).tell(report(FailedHandshake.REFUSED))
    assert "this machine's certificate, of coordinator main, is valid from" in caplog.text
