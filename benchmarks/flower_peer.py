"""Flower's SuperLink and SuperNodes as real processes, and one run of `flower_app` on them."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.memory_watch import Peaks
from benchmarks.processes import ROOT, NotMeasured, Processes, free_address

PEERS = ROOT / ".venv-peers" / "bin"
NUM_TENSORS = 10
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
PYPROJECT = """\
[project]
name = "exchange"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "atoll"
[tool.flwr.app.components]
serverapp = "{app}:server_app"
clientapp = "{app}:client_app"
[tool.flwr.app.config]
"""


def check_installed() -> None:
    """Check that Flower is installed.

    Raises:
        NotMeasured: it is not.
    """
    if not (PEERS / "flower-superlink").exists():
        raise NotMeasured("Flower is not installed in .venv-peers: make peers")


@dataclass
class Flower:
    """A SuperLink with several SuperNodes; all their processes inherit the settings."""

    processes: Processes
    num_clients: int
    num_elements: int
    settings: Mapping[str, str] = field(default_factory=dict)
    module: str = "flower_app"
    """The app, a module of the benchmarks."""
    asked_at: float = 0.0
    """The time of `flwr run`, once it was called [s since the epoch]."""
    rows: list[dict[str, float]] = field(default_factory=list)
    """The lines that the app has written, one for each round."""

    def run(self, num_rounds: int, limit_s: float) -> tuple[list[float], dict[str, int]]:
        """Run the app; return the seconds of each round, and the peak memory of each kind of process [bytes]."""
        check_installed()
        folder, address = self.processes.folder, free_address()
        app, out = folder / "app", folder / "rounds.jsonl"
        app.mkdir()
        shutil.copy(ROOT / "benchmarks" / f"{self.module}.py", app)
        values = {"num-clients": self.num_clients, "num-elements": self.num_elements, "num-rounds": num_rounds}
        lines = [f"{name} = {value}" for name, value in {**values, "num-tensors": NUM_TENSORS}.items()]
        (app / "pyproject.toml").write_text(
            PYPROJECT.format(app=self.module) + "\n".join([*lines, f'out = "{out}"', ""])
        )
        home = folder / "home"
        home.mkdir()
        host, _, port = address.rpartition(":")
        (home / "config.toml").write_text(f'[superlink.bench]\naddress = "{address}"\ninsecure = true\n')
        path = f"{PEERS}:{os.environ['PATH']}"
        environment = {**QUIET, **self.settings, "FLWR_HOME": str(home), "PATH": path, "PYTHONPATH": ""}
        link = [str(PEERS / "flower-superlink"), "--insecure", "--host", host, "--port", port]
        self.processes.start("superlink", [*link, "--disable-runtime-dependency-installation"], environment)
        self._wait_for_port(int(port))
        for number in range(self.num_clients):
            node_port = free_address().rpartition(":")[2]
            node = [str(PEERS / "flower-supernode"), "--insecure", "--superlink", address, "--port", node_port]
            self.processes.start(f"supernode{number}", node, environment)
        self.asked_at = time.time()
        started = subprocess.run(
            [str(PEERS / "flwr"), "run", str(app), "bench"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if started.returncode:
            raise NotMeasured(f"flwr run: {started.stdout[-1500:]}{started.stderr[-1500:]}")
        with Peaks({name: process.pid for name, process in self.processes.running.items()}) as peaks:
            seconds = self._wait(out, num_rounds, limit_s)
        return seconds, peaks.greatest

    def _wait(self, out: Path, num_rounds: int, limit_s: float) -> list[float]:
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            self.rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
            if len(self.rows) == num_rounds:
                return [row["seconds"] for row in self.rows]
            time.sleep(0.2)
        raise NotMeasured(
            f"{len(self.rows)} of {num_rounds} rounds in {limit_s:g} s: {self.processes.last_words('superlink')}"
        )

    def _wait_for_port(self, port: int) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with Path("/proc/net/tcp").open() as table:
                if any(f":{port:04X} 00000000:0000 0A" in line for line in table):
                    return
            time.sleep(0.1)
        raise NotMeasured(f"the SuperLink does not listen:\n{self.processes.last_words('superlink')}")
