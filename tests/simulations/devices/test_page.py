"""The examples of docs/devices.md are valid, and have the properties that the page states."""

import re
from pathlib import Path

import pytest

from atoll.operations.load import load_run
from atoll.protocol.settings import ConfigError, load_text
from atoll.simulations.devices.config import DeviceConfig
from atoll.simulations.federation.config import SimulationFile

PAGE = (Path(__file__).parents[3] / "docs" / "devices.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_is_a_run_s_with_20_stragglers_of_100() -> None:
    [text] = blocks("toml")
    devices = load_text(SimulationFile, text, name="the page").devices
    fleet = devices.of([f"c{number:04}" for number in range(100)], seed=0)
    assert fleet.stragglers.sum() == 20
    assert fleet.next_change("c0000", 0.0) is not None


def test_the_traces_are_read(tmp_path: Path) -> None:
    by_client, by_weight, awake = blocks("csv")
    for name, text in (("clients.csv", by_client), ("kinds.csv", by_weight), ("awake.csv", awake)):
        (tmp_path / name).write_text(text)
    measured = DeviceConfig(trace=tmp_path / "clients.csv", availability="trace", awake_trace=tmp_path / "awake.csv")
    fleet = measured.of(["north", "south"], seed=0)
    assert fleet["south"].up_bytes_per_s == 125_000
    assert [fleet.next_change("south", t) for t in (0.0, 30_000.0, 72_000.0)] == [21_600, 72_000, 86_400 + 21_600]
    kinds = DeviceConfig(trace=tmp_path / "kinds.csv").of(["a", "b"], seed=0)
    assert {kinds[name].examples_per_s for name in "ab"} <= {40.0, 200.0, 1500.0}


def test_the_faults_are_told_as_the_page_says(tmp_path: Path) -> None:
    by_client, _, awake = blocks("csv")
    (tmp_path / "devices.csv").write_text(by_client.replace("15,4,1,200", "15,4,-1,200"))
    (tmp_path / "awake.csv").write_text(awake.replace("72000,86400,86400", "20000,86400,86400"))
    traces = DeviceConfig(trace=tmp_path / "devices.csv", availability="trace", awake_trace=tmp_path / "awake.csv")
    found = faults(traces, tmp_path, "north")
    (tmp_path / "awake.csv").write_text(awake)
    (tmp_path / "devices.csv").write_text(by_client + "west,1,1,1,1\n")
    found += faults(traces, tmp_path, "north", "south", "west")
    assert found == re.findall(r"^    (.*\.csv: .*)$", PAGE, re.MULTILINE)


def faults(traces: DeviceConfig, folder: Path, *names: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        traces.of(names, seed=0)
    return [fault.removeprefix(f"{folder}/") for fault in refusal.value.faults]


def test_a_trace_is_looked_for_beside_the_toml_and_one_on_the_command_line_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "run.toml"
    path.write_text(
        "task = 'm:t'\n[devices]\ntrace = 'devices.csv'\navailability = 'trace'\nawake_trace = '/there/a.csv'\n"
    )
    monkeypatch.chdir(tmp_path)
    devices = load_run("runs/run.toml", kind=SimulationFile).devices
    assert (devices.trace, devices.awake_trace) == (tmp_path / "runs" / "devices.csv", Path("/there/a.csv"))
    assert load_run(str(path), ["devices.trace=b.csv"], kind=SimulationFile).devices.trace == tmp_path / "b.csv"
