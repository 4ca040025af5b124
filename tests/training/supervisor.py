"""A supervisor to be killed: python supervisor.py VERSION OUT MARK DEED BUDGET LEASE LOG."""

import sys
from pathlib import Path

from atoll.training.worker.process import Worker

model, out, mark, deed, budget_s, lease_s, log = sys.argv[1:]
worker = Worker(f"{Path(__file__).parent}/troublesome_task.py:task", site="here", log_path=Path(log))
worker.call(
    "train",
    600.0,
    model=model,
    out=out,
    seed=1,
    round_id=1,
    local={"do": deed, "file": mark},
    budget_s=float(budget_s),
    lease_s=float(lease_s),
)
