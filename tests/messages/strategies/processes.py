"""A hosted run of cases by real processes: a coordinator and an agent for each site."""

from tests.federation.processes import Federation, ended_after
from tests.messages.strategies.table import FOLDER, NODES, SITES


def by_processes(folder, options):
    """Run cases, and return the folder with their files."""
    with ended_after(Federation(folder, task=str(FOLDER))) as it:
        settings = {f"task.{name}": f'"{value}"' for name, value in options.items()}
        settings |= {"round.cohort_size": NODES, "round.quorum": 1, "round.min_available": NODES}
        given = {"name": "table", "coordinator.listen": it.address, "coordinator.enrol": "127.0.0.1:0", **settings}
        overrides = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
        it.start("coordinator", "coordinator", it.task, "--state", it.state, *overrides)
        it.wait_for(lambda: (it.state / "coordinator.json").exists())
        for place, site in enumerate(SITES):
            it.agent(site, **{"task.partition-id": place, "task.num-partitions": NODES})
        assert it.wait_for_end(timeout=1200) == 0, it.log("coordinator")[-3000:]
        return it.state / "runs" / "table-1" / "program"
