"""The device model of a user's own: one client at a time, by its name and the seed alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.protocol.settings import ConfigError, load_text
from atoll.simulations.devices.config import DeviceConfig
from tests.plugins.packages import install

MODEL = """
def phone(client, rng, median=100.0):
    return {"examples_per_s": median * rng.lognormal(), "latency_s": 0.25}


def constant(client, rng, **values):
    return values


def uneven(client, rng):
    return {"latency_s": 1} if client == "a" else {"up_bytes_per_s": 1}


def broken(client, rng):
    return {}[client]


def leaving(client, rng):
    raise SystemExit(3)


def listed(client, rng):
    return [1.0]
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "models.py").write_text(MODEL)
    return str(tmp_path / "models.py")


def config(**settings: Any) -> DeviceConfig:
    return DeviceConfig(**settings)


def test_a_device_follows_from_the_client_and_the_seed_alone(place: str) -> None:
    devices = config(model=f"{place}:phone", options={"median": 50.0}, up_bytes_per_s=7.0, seconds_per_round=3.0)
    fleet, other = devices.of(["a", "b", "c"], seed=1), devices.of(["c", "a"], seed=1)
    assert fleet["a"] == other["a"]
    assert fleet["c"] == other["c"] != devices.of(["c"], seed=2)["c"]
    assert (fleet["a"].latency_s, fleet["a"].up_bytes_per_s) == (0.25, 7.0)
    assert fleet["a"].round_s is None, "a speed in place of the seconds of the table"
    many = devices.of([f"c{k}" for k in range(2000)], seed=0)
    assert np.median(many.speeds.examples_per_s) == pytest.approx(50, rel=0.1)


def test_stragglers_are_slower_than_the_model_says(place: str) -> None:
    given = {"seconds_per_round": 2}
    fleet = config(model=f"{place}:constant", options=given, stragglers=0.5, slowdown=3.0).of(["a", "b"], seed=0)
    assert sorted(device.train_seconds(9) for device in fleet.values()) == [2, 6]


@pytest.mark.parametrize(
    ("function", "options", "fault"),
    [
        ("broken", {}, "for client 'a' raised KeyError: 'a'"),
        ("leaving", {}, "for client 'a' raised SystemExit: 3"),
        ("listed", {}, "for client 'a' gave list; allowed: a table with one or more of examples_per_s, "),
        ("constant", {"speed": 3}, "for client 'a' gave speed; allowed: a table with"),
        ("constant", {"latency_s": -1}, "for client 'a' gave latency_s = -1; allowed: a number >= 0"),
        ("constant", {"up_bytes_per_s": 0}, "gave up_bytes_per_s = 0; allowed: a number > 0"),
        ("constant", {"up_bytes_per_s": "fast"}, "gave up_bytes_per_s = 'fast'; allowed"),
        ("constant", {"examples_per_s": 1, "seconds_per_round": 1}, "allowed: one of them"),
        ("uneven", {}, "for client 'b' gave up_bytes_per_s, and latency_s for client 'a'"),
        ("phone", {"mean": 3}, "raised TypeError: phone() got an unexpected keyword argument 'mean'"),
        ("no_such", {}, "there is no no_such in"),
    ],
)
def test_what_is_no_device_is_refused(place: str, function: str, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config(model=f"{place}:{function}", options=options).of(["a", "b"], seed=0)
    assert fault in str(refusal.value)


def test_settings_that_do_not_go_with_a_model_are_refused() -> None:
    text = "model = 'm:f'\ntrace = 'devices.csv'\n"
    with pytest.raises(ConfigError, match="model and trace: allowed is one of them"):
        load_text(DeviceConfig, text, name="")
    with pytest.raises(ValueError, match="options median belong to model, and model is absent"):
        config(options={"median": 1})
    with pytest.raises(ValueError, match="allowed: module:function"):
        config(model="phones")


def test_a_package_declares_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"atoll.devices": {"phone": "acme_phones:phone"}}
    install(tmp_path, "acme-phones", modules={"acme_phones": MODEL}, points=points)
    monkeypatch.syspath_prepend(tmp_path)
    by_name = config(model="phone").of(["a", "b"], seed=4)
    assert dict(by_name) == dict(config(model=f"{tmp_path}/acme_phones.py:phone").of(["a", "b"], seed=4))
