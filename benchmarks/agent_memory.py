"""The memory of an agent whose worker is a mesh, over its idle one, while a whole round of a large model passes.

    python -m benchmarks.agent_memory [--mb N]

The version comes down and the update goes up through the agent, which must hold windows of them and never a tensor. The
other side is a rank of the same client, which holds its share of the model.
"""

import argparse
import tempfile
import time
from pathlib import Path

from atoll.protocol.identity.names import Identity, Role
from benchmarks.federation import descendants
from benchmarks.members import equip
from benchmarks.processes import Processes, agent_command, coordinator_command, free_address
from benchmarks.report import Bar, conclude, say

TASK, MESH = "benchmarks.crew_task:table", "dp_shard=2"
OVER_IDLE_MAX = 64 * 2**20
POLL_S, LIMIT_S = 0.005, 550.0


def anonymous(process: int) -> int:
    """Return the resident memory of a process that no file backs [bytes]; 0: it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def measure(folder: Path, num_bytes: int) -> dict[str, int]:
    """Return the memory of the agent before the round, its peak, and that of a rank [bytes]."""
    address, agent = free_address(), "a"
    equip(folder / "coordinator", folder / agent, Identity(Role.CLIENT, agent))
    environment = {"ATOLL_BENCH_ELEMENTS": str(num_bytes // 4)}
    with Processes(folder) as processes:
        client = agent_command(
            TASK, site=agent, coordinator=address, state=folder / agent, exit_when_done=True, crew__mesh=MESH
        )
        processes.start(agent, client, environment)
        until, idle, peak, of_rank = time.monotonic() + LIMIT_S, 0, 0, 0
        while "ranks are here" not in processes.log(agent).read_text():
            assert time.monotonic() < until, processes.last_words(agent)
            time.sleep(0.1)
        process = processes.running[agent]
        idle = anonymous(process.pid)
        state = {"coordinator__listen": address, "coordinator__state": folder / "coordinator"}
        command = coordinator_command(
            TASK, name="memory", rounds=1, round__cohort_size=1, evaluation__server_every=0, **state
        )
        processes.start("coordinator", command, environment)
        while process.poll() is None:
            assert time.monotonic() < until, processes.last_words(agent)
            peak = max(peak, anonymous(process.pid))
            of_rank = max([of_rank, *map(anonymous, descendants(process.pid))])
            time.sleep(POLL_S)
        assert "is accepted" in processes.log(agent).read_text(), processes.last_words(agent)
    return {"idle": idle, "peak": peak, "rank": of_rank}


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=200, help="size of the model [MB]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        found = measure(Path(folder), options.mb * 10**6)
    say(", ".join(f"{name} {value / 2**20:.1f} MiB" for name, value in found.items()))
    over = found["peak"] - found["idle"]
    bars = [Bar.at_most(f"an agent's memory over its idle one, model of {options.mb} MB [bytes]", over, OVER_IDLE_MAX)]
    return conclude(
        "agent_memory", bars, ours={"agent": found["peak"], "idle": found["idle"]}, theirs={"rank": found["rank"]}
    )


if __name__ == "__main__":
    raise SystemExit(main())
