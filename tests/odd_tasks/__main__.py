"""The table of all odd tasks in all ways, by the commands as a user types them: `python -m tests.odd_tasks [TASK...]`.

It prints each cell as it is known, then the sentences of the refusals, and ends with 1 if a cell is wrong. The commands
start warm (`tests.warm`); with ATOLL_COLD_START=1 each is an exec.
"""

import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.federation.processes import ATOLL, federation
from tests.odd_tasks import plain
from tests.odd_tasks.cells import WAYS, Answer, Verdict, cell, judge
from tests.odd_tasks.table import BY_PASS, TASKS, wrong
from tests.warm import start

LIMIT_S = 300
SITES = ("a", "b", "c")


def run(*arguments: object) -> Answer:
    done = subprocess.run(
        [ATOLL, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stderr


def by_agents(name: str, folder: Path) -> Verdict:
    """Run a task with a coordinator and three agents as processes."""
    reference, task = TASKS[name]
    folder.mkdir()
    with federation(folder, task=reference) as run:
        settings = {"rounds": plain.ROUNDS, "round__cohort_size": 3, "round__retry": 0, "round__deadline": 120}
        run.coordinator(**settings)
        agents = [run.agent(site) for site in SITES]
        until = time.monotonic() + LIMIT_S
        while run.running["coordinator"].poll() is None and not all(agent.poll() for agent in agents):
            assert time.monotonic() < until, run.log("coordinator")
            time.sleep(0.1)
        code = run.running["coordinator"].poll()  # None: it waits for agents, which have all refused the task
        answer = (0 if code == 0 else 2, "\n".join(run.log(who) for who in ("coordinator", *SITES)))
    if answer[0]:  # the coordinator's own refusal, or the failure that each agent reports
        return Verdict("refused", answer[1]) if "Traceback" not in answer[1] else Verdict("WRONG", answer[1][-300:])
    return judge(task, "agents", answer, run.state, f"**/{plain.ROUNDS:06d}.safetensors")


def main(names: list[str]) -> int:
    """Print the table; return the exit code."""
    faults: list[str] = []
    sentences: dict[str, list[str]] = defaultdict(list)
    print(f"{'':20}" + "".join(f"{way:>12}" for way in (*WAYS, "agents")))
    for name in names or TASKS:
        reference, task = TASKS[name]
        print(f"{name:20}", end="", flush=True)
        for way in (*WAYS, "agents"):
            with tempfile.TemporaryDirectory() as folder:
                here = Path(folder) / "cell"
                if way == "agents":
                    verdict = by_agents(name, here)
                else:
                    verdict = cell(task, reference, way, here, run, by_pass=name in BY_PASS)
            fault = wrong(name, way, verdict)
            if fault is not None:
                faults.append(f"{name}, {way}: {fault}")
            elif verdict.word == "refused" and way != "agents":
                sentences[verdict.sentence].append(f"{name} ({way})")
            print(f"{verdict.word if fault is None else 'WRONG':>12}", end="", flush=True)
        print(flush=True)
    for sentence, cells in sentences.items():
        print(f"\n{', '.join(cells)}:\n    {sentence}")
    for fault in faults:
        print(f"\nWRONG {fault}")
    print(f"\n{len(names or TASKS)} tasks in {len(WAYS) + 1} ways: {len(faults)} wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    start.install()
    sys.exit(main(sys.argv[1:]))
