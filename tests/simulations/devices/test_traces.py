"""Trace files: each fault is reported with its line, its column and the allowed values."""

from collections import Counter
from pathlib import Path

import pytest

from atoll.protocol.settings import ConfigError
from atoll.simulations.devices.config import DeviceConfig
from atoll.simulations.devices.fleet import Device, Fleet
from tests.later import later

stats = later("scipy.stats")

HEADER = "client,examples_per_s,down_mbps,up_mbps,latency_ms\n"


def fleet(tmp_path: Path, text: str, *names: str) -> Fleet:
    path = tmp_path / "devices.csv"
    path.write_text(text)
    return DeviceConfig(trace=path).of(names, seed=0)


def faults(tmp_path: Path, text: str, *names: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        fleet(tmp_path, text, *names)
    return [fault.removeprefix(f"{tmp_path}/devices.csv: ") for fault in refusal.value.faults]


def faults_awake(tmp_path: Path, text: str, *names: str) -> list[str]:
    path = tmp_path / "awake.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        DeviceConfig(availability="trace", awake_trace=path).of(names, seed=0)
    return [fault.removeprefix(f"{path}: ") for fault in refusal.value.faults]


def test_each_client_has_its_own_line_in_any_order_of_lines_and_columns(tmp_path: Path) -> None:
    text = "up_mbps, latency_ms ,client,down_mbps,examples_per_s\n\n8,20,b,80,1e3\n0.8,0,a,1.6,12.5\n"
    found = fleet(tmp_path, text, "a", "b")
    assert found["a"] == Device(12.5, 200_000.0, 100_000.0, 0.0)
    assert found["b"] == Device(1000.0, 1e7, 1e6, 0.02)


def test_kinds_of_devices_are_dealt_out_by_weight(tmp_path: Path) -> None:
    names = [f"c{index}" for index in range(3000)]
    text = "weight,examples_per_s,down_mbps,up_mbps,latency_ms\n1,10,1,1,1\n2,20,1,1,1\n3,30,1,1,1\n"
    found = fleet(tmp_path, text, *names)
    counts = Counter(found[name].examples_per_s for name in names)
    assert stats.chisquare([counts[10.0], counts[20.0], counts[30.0]], [500, 1000, 1500]).pvalue > 0.01
    assert fleet(tmp_path, text, "c7")["c7"] == found["c7"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["line 1, got ''; allowed: client,examples_per_s,down_mbps,up_mbps,latency_ms or weight,examples_per_s,"]),
        (
            "client,examples_per_s,down_mbps,up_mbps\n",
            ["line 1, got 'client,examples_per_s,down_mbps,up_mbps'; allowe"],
        ),
        ("client,speed,down_mbps,up_mbps,latency_ms\n", ["line 1, unknown column 'speed'; allowed: client,examples"]),
        (HEADER, ["line 2, is missing; allowed: at least one line below the header"]),
        (HEADER + "a,1,1,1\n", ["line 2, has 4 cells; allowed: 5, as the header"]),
        (HEADER + "a,1,,1,1\n", ["line 2, column down_mbps: is empty; allowed: a number > 0"]),
        (
            HEADER + ",1,1,1,1\n",
            ["line 2, column client: is empty; allowed: a name", "no line for 1 of 1 client: 'a'"],
        ),
        (HEADER + "a,0,1,1,1\n", ["line 2, column examples_per_s: got '0'; allowed: a number > 0"]),
        (HEADER + "a,1,1,-3,1\n", ["line 2, column up_mbps: got '-3'; allowed: a number > 0"]),
        (HEADER + "a,1,1,1,-1\n", ["line 2, column latency_ms: got '-1'; allowed: a number >= 0"]),
        (
            HEADER + "a,fast,1,1,nan\n",
            ["line 2, column examples_per_s: got 'fast'", "line 2, column latency_ms: got 'nan'"],
        ),
        (HEADER + "a,1,1,1,1\n\na,2,2,2,2\n", ["line 4, column client: 'a' stands on line 2 already"]),
        (HEADER + "b,1,1,1,1\n", ["no line for 1 of 1 client: 'a'"]),
    ],
)
def test_a_hole_in_a_trace_of_devices_is_named(tmp_path: Path, text: str, expected: list[str]) -> None:
    found = faults(tmp_path, text, "a")
    assert [line[: len(start)] for line, start in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("client,from_s\n", "line 1, got 'client,from_s'; allowed: client,from_s,to_s or client,from_s,to_s,period_s"),
        ("client,from_s,to_s\na,5,5\n", "line 2, column to_s: got 5; allowed: a number > from_s (5)"),
        ("client,from_s,to_s\na,-1,5\n", "line 2, column from_s: got '-1'; allowed: a number >= 0"),
        (
            "client,from_s,to_s\na,5,9\na,0,6\n",
            "line 2, column from_s: got 5, which overlaps: 'a' is awake until 6 by line 3",
        ),
        (
            "client,from_s,to_s,period_s\na,0,5,10\na,6,12,10\n",
            "line 3, column to_s: got 12; allowed: a number <= period_s (10)",
        ),
        (
            "client,from_s,to_s,period_s\na,0,5,10\na,6,8,12\n",
            "line 3, column period_s: got 12; allowed: 10, as on line 2",
        ),
        ("client,from_s,to_s\nb,5,9\n", "no line for 1 of 1 client: 'a'"),
    ],
)
def test_a_hole_in_a_trace_of_intervals_is_named(tmp_path: Path, text: str, expected: str) -> None:
    assert faults_awake(tmp_path, text, "a") == [expected]


def test_the_faults_are_in_order_of_the_lines_and_those_beyond_twenty_are_counted(tmp_path: Path) -> None:
    found = faults(tmp_path, HEADER + "".join(f"c{n},0,1,1,1\n" for n in range(30)), "c0")
    assert len(found) == 21
    assert [line.split(",")[0] for line in found[:3]] == ["line 2", "line 3", "line 4"]
    assert found[-1] == "and 10 more faults"
    overlapping = "client,from_s,to_s\n" + "".join(f"c{n % 12},0,5\n" for n in range(24))
    found = faults_awake(tmp_path, overlapping, "c0")
    assert [line.split(",")[0] for line in found] == [f"line {n}" for n in range(14, 26)]


def test_faults_of_cells_of_intervals_and_of_the_whole_file_are_said_together(tmp_path: Path) -> None:
    text = "client,from_s,to_s,period_s\na,0,6,10\na,5,7,10\na,9,8,10\nb,0,12,10\nb,,5,10\nc,x,5,10\n"
    assert [fault.split("; allowed")[0].split(", which")[0] for fault in faults_awake(tmp_path, text, *"abcd")] == [
        "line 3, column from_s: got 5",
        "line 4, column to_s: got 8",
        "line 5, column to_s: got 12",
        "line 6, column from_s: is empty",
        "line 7, column from_s: got 'x'",
        "no line for 1 of 4 clients: 'd'",
    ]


def test_wrong_cells_hide_neither_a_line_twice_nor_a_client_without_one(tmp_path: Path) -> None:
    text = HEADER + "a,1,1,1,1\nb,0,1,1,1\na,1,1,1\n,1,1,1,1\n,1,1,1,1\n"
    assert faults(tmp_path, text, *"abc") == [
        "line 3, column examples_per_s: got '0'; allowed: a number > 0",
        "line 4, has 4 cells; allowed: 5, as the header",
        "line 4, column client: 'a' stands on line 2 already",
        "line 5, column client: is empty; allowed: a name",
        "line 6, column client: is empty; allowed: a name",
        "no line for 1 of 3 clients: 'c'",
    ]
    many = faults(tmp_path, HEADER + "a,0,1,1,1\n" * 30, "a", "b")
    assert many[-2:] == ["and 39 more faults", "no line for 1 of 2 clients: 'b'"]


def test_the_faults_of_both_traces_are_said_together(tmp_path: Path) -> None:
    (tmp_path / "devices.csv").write_text(HEADER)
    (tmp_path / "awake.csv").write_text("client,from_s\n")
    config = DeviceConfig(trace=tmp_path / "devices.csv", availability="trace", awake_trace=tmp_path / "awake.csv")
    with pytest.raises(ConfigError) as refusal:
        config.of(["a"], seed=0)
    assert [Path(fault.split(":")[0]).name for fault in refusal.value.faults] == ["devices.csv", "awake.csv"]


def test_missing_clients_are_counted_and_some_are_named(tmp_path: Path) -> None:
    [found] = faults(tmp_path, HEADER + "c3,1,1,1,1\n", *(f"c{n}" for n in range(9)))
    assert found == "no line for 8 of 9 clients: 'c0', 'c1', 'c2', 'c4', 'c5', ..."


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*nowhere.csv$"):
        DeviceConfig(trace=tmp_path / "nowhere.csv").of(["a"], seed=0)
