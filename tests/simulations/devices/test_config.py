"""The settings of the table [devices] and the fleets that they describe."""

import hashlib
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from atoll.protocol.settings import STRICT, ConfigError, describe, effective, load_text
from atoll.simulations.devices.config import DeviceConfig
from atoll.simulations.devices.fleet import Device, Fleet
from tests.later import later

stats = later("scipy.stats")

NAMES = [f"client-{index}" for index in range(2000)]


class Table(BaseModel, **STRICT):
    devices: DeviceConfig = DeviceConfig()


def fleet(names: list[str] = NAMES, seed: int = 0, **settings: Any) -> Fleet:
    return DeviceConfig(**settings).of(names, seed=seed)


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        load_text(Table, f"[devices]\n{text}", name="run.toml")
    return [*refusal.value.faults]


# ---------------------------------------------------------------- what may be said


def test_by_default_all_devices_are_alike_fast_and_always_awake() -> None:
    plain = fleet(["a", "b"])
    assert plain["a"] == plain["b"] == Device(1000.0, 12.5e6, 12.5e6, 0.01)
    assert [plain.is_awake("a", t) for t in (0.0, 1e9)] == [True, True]
    assert plain.next_change("b", 0.0) is None
    assert [*plain] == ["a", "b"]
    with pytest.raises(KeyError):
        plain["c"]


def test_a_table_is_read_from_toml_and_written_as_it_was() -> None:
    text = """[devices]
    examples_per_s = {median = 500, sigma = 0.8}
    up_bytes_per_s = {low = 1e5, high = 1e6}
    latency_s = 0
    stragglers = 0.2
    availability = "daily"
    awake_hours = 8
    """
    table = load_text(Table, text, name="run.toml")
    assert load_text(Table, effective(table), name="") == table
    assert Table.model_validate_json(table.model_dump_json()) == table


def test_all_faults_of_a_table_are_named_at_once() -> None:
    assert faults("examples_per_s = {median = -1, sigma = 1}\nstragglers = 2\nslowdwn = 3.0") == [
        "run.toml: devices.examples_per_s: got {'median': -1, 'sigma': 1}; allowed: number > 0 | "
        "{median: number > 0, sigma: number >= 0, <= 5} | {low: number > 0, high: number > 0}",
        "run.toml: devices.stragglers: got 2; allowed: number >= 0, <= 1",
        "run.toml: devices.slowdwn: unknown key (did you mean slowdown? known: "
        f"{', '.join(setting.key.removeprefix('devices.') for setting in describe(Table))})",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("up_bytes_per_s = {low = 2.0, high = 1.0}", "devices.up_bytes_per_s: low 2 is more than high (1)"),
        ("trace = 'a.csv'\nlatency_s = 1.0", "devices: latency_s: the trace sets it already"),
        ("examples_per_s = 1.0\nseconds_per_round = 1.0", "devices: examples_per_s and seconds_per_round: allowed is"),
        ("slowdown = 3.0", "devices: slowdown applies to stragglers, and stragglers is 0"),
        ("sleepless = 0.5", "devices: sleepless applies only to availability daily, and availability is always"),
        (
            "availability = 'daily'\nawake_trace = 'a'",
            "devices: awake_trace applies only to availability trace, and availabi",
        ),
        ("availability = 'trace'", "devices: availability trace needs awake_trace"),
        ("awake_hours = 0.0", "devices.awake_hours: got 0.0; allowed: number > 0, <= 24"),
        ("latency_s = inf", "devices.latency_s: got inf"),
        ("latency_s = -1.0", "devices.latency_s: got -1.0; allowed: number >= 0 | {"),
    ],
)
def test_what_contradicts_itself_is_refused(text: str, fault: str) -> None:
    [found] = faults(text)
    assert found.startswith(f"run.toml: {fault}")


def test_the_faults_of_both_traces_are_named_at_once(tmp_path: Path) -> None:
    speeds, awake = tmp_path / "speeds.csv", tmp_path / "awake.csv"
    speeds.write_text("client,examples_per_s,down_mbps,up_mbps,latency_ms\na,0,1,1,1\n")
    awake.write_text("client,from_s,to_s\na,3,2\n")
    with pytest.raises(ConfigError) as refusal:
        fleet(["a"], trace=speeds, availability="trace", awake_trace=awake)
    assert refusal.value.faults == (
        f"{speeds}: line 2, column examples_per_s: got '0'; allowed: a number > 0",
        f"{awake}: line 2, column to_s: got 2; allowed: a number > from_s (3)",
    )


# ---------------------------------------------------------------- spread over the clients as promised


def test_each_property_is_spread_as_scipy_has_it() -> None:
    """Apply the Kolmogorov-Smirnov test, which an honest sample of this seed passes."""
    speeds = fleet(
        seed=1,
        examples_per_s={"median": 500.0, "sigma": 0.8},
        down_bytes_per_s={"low": 1e5, "high": 1e6},
        up_bytes_per_s={"median": 1e4, "sigma": 2.0},
        latency_s={"low": 0.01, "high": 0.5},
    ).speeds
    for values, expected in (
        (speeds.examples_per_s, stats.lognorm(s=0.8, scale=500.0)),
        (speeds.down_bytes_per_s, stats.uniform(1e5, 9e5)),
        (speeds.up_bytes_per_s, stats.lognorm(s=2.0, scale=1e4)),
        (speeds.latency_s, stats.uniform(0.01, 0.49)),
    ):
        assert stats.kstest(values, expected.cdf).pvalue > 0.01
        assert stats.kstest(values * 1.1, expected.cdf).pvalue < 0.01  # the test bites


def test_the_properties_of_a_client_do_not_hang_together() -> None:
    wide = {"median": 1.0, "sigma": 1.0}
    speeds = fleet(examples_per_s=wide, down_bytes_per_s=wide, up_bytes_per_s=wide, latency_s=wide).speeds
    columns = [speeds.examples_per_s, speeds.down_bytes_per_s, speeds.up_bytes_per_s, speeds.latency_s]
    correlations = np.corrcoef(np.log(columns)) - np.eye(4)
    assert np.abs(correlations).max() < 4 / len(NAMES) ** 0.5


@given(st.permutations(NAMES[:30]), st.integers(1, 30), st.integers(0, 2**63 - 1))
@settings(deadline=None, max_examples=30)
def test_a_device_depends_on_seed_and_name_alone(shuffled: list[str], count: int, seed: int) -> None:
    table = DeviceConfig(
        examples_per_s={"median": 500.0, "sigma": 0.8},  # type: ignore[arg-type]
        availability="daily",
    )
    whole, some = table.of(NAMES[:30], seed=seed), table.of(shuffled[:count], seed=seed)
    assert all(some[name] == whole[name] for name in some)
    assert all(some.next_change(name, 5.0) == whole.next_change(name, 5.0) for name in some)


@pytest.mark.real
def test_a_fleet_is_the_same_in_every_process_and_each_seed_has_its_own() -> None:
    program = (
        "from atoll.simulations.devices.config import DeviceConfig\n"
        "found = DeviceConfig(examples_per_s={'low': 1.0, 'high': 2.0}, availability='daily').of(['a', 'ß'], seed=5)\n"
        "print(found['ß'].examples_per_s, found.next_change('a', 0.0))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[3],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    digest = hashlib.blake2b("ß".encode(), key=(5).to_bytes(8, "little"), person=b"atoll devices").digest()
    u = ((int.from_bytes(digest[:8], "little") >> 11) + 0.5) / 2**53
    assert outputs == {f"{1.0 + u} 18878.395525024513\n"}
    speeds = {fleet(["a"], seed, examples_per_s={"low": 1.0, "high": 2.0})["a"].examples_per_s for seed in range(9)}
    assert len(speeds) == 9


# ---------------------------------------------------------------- stragglers


def stragglers(of: Fleet) -> set[str]:
    return {name for name, is_slow in zip(of, of.stragglers, strict=True) if is_slow}


@pytest.mark.parametrize(("share", "count"), [(0.2, 20), (0.0, 0), (1.0, 100), (0.004, 0), (0.25, 25)])
def test_stragglers_are_a_whole_number_of_clients(share: float, count: int) -> None:
    names = NAMES[:100]
    plain, slow = fleet(names), fleet(names, stragglers=share)
    assert slow.stragglers.sum() == count
    for name in names:
        times = 10.0 if name in stragglers(slow) else 1.0
        assert slow[name].train_seconds(50) == pytest.approx(times * plain[name].train_seconds(50))
        assert slow[name].upload_seconds(50) == plain[name].upload_seconds(50)


def test_who_straggles_does_not_depend_on_the_order_of_the_names_but_on_the_seed() -> None:
    shuffled = random.Random(0).sample(NAMES, len(NAMES))
    one, other, reseeded = (
        fleet(names, seed, stragglers=0.2) for names, seed in ((NAMES, 0), (shuffled, 0), (NAMES, 1))
    )
    assert stragglers(one) == stragglers(other)
    both = len(stragglers(one) & stragglers(reseeded))
    assert stats.binomtest(both, len(NAMES), 0.04).pvalue > 0.01


# ---------------------------------------------------------------- how long things take


def test_the_seconds_of_a_device_follow_its_speeds() -> None:
    device = Device(examples_per_s=50.0, down_bytes_per_s=1000.0, up_bytes_per_s=100.0, latency_s=0.5)
    assert device.download_seconds(2000) == 2.5
    assert device.train_seconds(200) == 4.0
    assert device.upload_seconds(2000) == 20.5


def test_a_round_may_take_as_long_as_is_said_whatever_the_data() -> None:
    whole = fleet(NAMES, seconds_per_round={"low": 10.0, "high": 20.0}, stragglers=0.5, slowdown=3.0)
    for name in NAMES[:20]:
        seconds = whole[name].train_seconds(1)
        assert seconds == whole[name].train_seconds(10**6)
        assert 10.0 <= seconds / (3.0 if name in stragglers(whole) else 1.0) <= 20.0
