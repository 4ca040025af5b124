"""The agent behind a proxy, through which its session, its download and its upload go."""

import numpy as np
import pytest

from atoll.client.wire import download as download_module
from atoll.protocol.settings import ConfigError
from tests.client.connect_proxy import connect_proxy
from tests.client.fake_coordinator import MIB, Instant, Version, agent, lagoon, live, model, until

ELSEWHERE = "lagoon.example:7070"
"""Host name that this machine cannot resolve: only the proxy reaches it."""


@pytest.fixture(autouse=True)
def _plain_to_elsewhere(monkeypatch):
    """Treat a host name as another machine, since insecure connections stay on one machine."""
    monkeypatch.setattr("atoll.protocol.identity.dialer.loopback_only", lambda address: None)
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("num_tunnels", [2, 3])
@live
async def test_session_download_and_upload_go_through_the_proxy(tmp_path, monkeypatch, caplog, capfd, num_tunnels):
    caplog.set_level("DEBUG")
    if num_tunnels == 3:  # beside those of the session and of transfers, a large download has one
        monkeypatch.setattr(download_module, "LARGE_BYTES", MIB)
    async with lagoon() as coordinator, connect_proxy(coordinator.port, "north:s3cr:t/") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://north:s3cr%3At%2F@{proxy.address}")
        coordinator.address = ELSEWHERE
        update = Instant({"w": np.ones(MIB // 2, np.float32)})
        async with agent(coordinator, tmp_path / "a", update):
            version = coordinator.add(Version(model(w=MIB // 2)))
            await coordinator.invite(version, inline=False)
            await coordinator.accepted.wait()
        tunnels = [(line["to"], line["status"]) for line in proxy.lines if "to" in line]
        assert tunnels == [(ELSEWHERE, "200")] * num_tunnels
        await until(lambda: sum("up" in line for line in proxy.lines) == num_tunnels)
        assert sum(line.get("up", 0) for line in proxy.lines) > 2 * MIB
        assert sum(line.get("down", 0) for line in proxy.lines) > 2 * MIB
    said = caplog.text + "".join(capfd.readouterr())
    assert "s3cr" not in said
    assert "north:" not in said


@live
async def test_a_proxy_that_refuses_is_named_and_tried_again_and_its_password_is_not(
    tmp_path, monkeypatch, caplog, capfd
):
    async with lagoon() as coordinator, connect_proxy(coordinator.port, "north:right") as proxy:
        monkeypatch.setenv("https_proxy", f"http://north:s3cret@{proxy.address}")
        coordinator.address = ELSEWHERE
        async with agent(coordinator, tmp_path / "a"):
            await until(lambda: len(proxy.lines) >= 2)
            await until(lambda: "HTTP proxy returned response code 407" in caplog.text)
        assert coordinator.hellos == []
    assert "s3cret" not in caplog.text + "".join(capfd.readouterr())


@live
async def test_this_machine_is_reached_without_the_proxy(tmp_path, monkeypatch):
    async with lagoon() as coordinator, connect_proxy(coordinator.port) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy.address}")
        async with agent(coordinator, tmp_path / "a"):
            await coordinator.connected()
        assert proxy.lines == []


@live
async def test_a_proxy_that_cannot_be_used_stops_the_agent_at_its_start(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "https://north:s3cret@proxy.example:3128")
    async with lagoon() as coordinator:
        with pytest.raises(ConfigError) as caught:
            async with agent(coordinator, tmp_path / "a") as running:
                await running
    assert str(caught.value).startswith("HTTPS_PROXY: got https://...; allowed: http://HOST:PORT or http://USER:PASS")
    assert "s3cret" not in str(caught.value)
