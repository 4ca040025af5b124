"""The state in which the commands of each page are executed, and their smaller or local form.

A reader begins a page with a project (`atoll new`), often with a coordinator that runs. `GIVEN` says which. A key
`PAGE#N` begins a new state at the page's block N (from 1, of those that are executed). `instead` puts in what a page
leaves to its reader (a join code, a path), and makes hours short; each of its parts must occur in a command.
"""

import sys
from dataclasses import dataclass, field
from typing import Literal

SITES = ("north", "south", "east")
"""The sites of a new project."""


@dataclass(frozen=True)
class Given:
    """What a reader has before the first command, and what differs from the page when its commands are executed.

    Attributes:
        run: `none`: a new project; `begun`: its run `digits-1`, open, with seven committed rounds, whose sites and
            coordinator have ended; `hosted`: the same, and its coordinator runs.
        instead: parts of commands, and what is executed in place of each.
        before: commands, and lines that are executed before each.
        codes: commands that end with another exit code than 0, or that are executed to their end for one.
        files: names, and text by which each is found among the page's blocks of TOML or Python, which is written to it.
        is_long: ten seconds or more, or much like another page: `make test-long` executes it, `make test` does not.
    """

    run: Literal["none", "begun", "hosted"] = "none"
    instead: dict[str, str] = field(default_factory=dict)
    before: dict[str, tuple[str, ...]] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    is_long: bool = False


NORTH = "--join $(atoll client invite north)"
RANK = "--join $(atoll client invite 0 --role aggregator --state ranked)"
OPERATOR = "$(atoll client invite ada --role operator)"
EVERY_SITE = (
    "for site in north south east; do "
    "atoll agent task.py:task --site $site --config agent.toml --join $(atoll client invite $site) & done; wait"
)
PRIVATE = " ".join(
    f"--set {setting}"
    for setting in (
        "aggregation.weighting=uniform",
        "privacy.epsilon=8",
        "privacy.delta=1e-5",
        "privacy.clip_norm=1",
    )
)
TWO_RANKS = "atoll coordinator run.toml --state ranked --aggregators 2 --set coordinator.start_aggregators=false"
WHOLE_LOG = {"2026-01-01": "2020-01-01", "2026-02-01": "2099-01-01"}
CHECKPOINT = "$(atoll audit verify --json | python -c 'import json, sys; print(json.load(sys.stdin)[\"checkpoint\"])')"
ELSEWHERE = {
    "/srv/authority": "authority",
    "atoll-state/identity/coordinator": "new-state/identity/coordinator",
    "atoll.example.org:7070": "$ADDRESS",
}
AUTHORITY_DIALS = {
    "atoll authority serve": ("atoll coordinator run.toml --state new-state --set coordinator.authority=elsewhere",)
}
DELETED = {"atoll run delete digits-1": "atoll run stop other-1 --reason done; echo y | atoll run delete other-1"}
FEW_STEPS = {"stdlib_lm.py:task": "stdlib_lm.py:task --steps 2"}
SMALL_PLAN = "layers=2,hidden=64,heads=4,vocab=512,sequence=64 --cluster h100-80 --batch 64 --dry-run 0,7"
SMALL_BATCHES = "--batches 16 --target 0.5 --max-steps 200"

GIVEN = {
    "CONTRIBUTING.md": Given(),
    "README.md": Given(
        files={"task.py": "task = Task("},
        instead={"--site north --join CODE": f"--site north {NORTH}", "git clone URL atoll && cd atoll && ": ""},
    ),
    "atoll/cli/project/README.md": Given(
        instead={
            "atoll agent task.py:task --site north --config agent.toml --join $(atoll client invite north)": EVERY_SITE
        },
        is_long=True,
    ),
    "docs/aggregation-ranks.md": Given(),
    "docs/aggregation-ranks.md#2": Given(instead={"/disk0/": "disk0/", "/disk1/": "disk1/"}, is_long=True),
    "docs/aggregation-ranks.md#3": Given(
        instead={
            "--rank 1 --of 4 --state atoll-state/aggregators/1of4 --join CODE": f"--rank 0 --of 2 --state x {RANK}"
        },
        before={"atoll aggregator": (TWO_RANKS,)},
        is_long=True,
    ),
    "docs/audit.md": Given(
        run="begun",
        instead={**WHOLE_LOG, "1289:5f0c…": CHECKPOINT, "/archive/hub": "archive-hub"},
        is_long=True,
    ),
    "docs/backup.md": Given(run="begun", is_long=True),
    "docs/commands.md": Given(
        instead={
            "--site north --join CODE": f"--site north {NORTH}",
            "--state /disk0/rank --join CODE": f"--state rank {RANK}",
        },
        before={"atoll aggregator": (TWO_RANKS,)},
        is_long=True,
    ),
    "docs/commands.md#3": Given(
        run="hosted",
        instead=DELETED,
        codes={"atoll run statistics other.toml": 2},  # no site is there
        is_long=True,
    ),
    "docs/commands.md#5": Given(
        run="hosted",
        instead={"atoll join CODE": f"atoll join {OPERATOR}", **ELSEWHERE},
        before=AUTHORITY_DIALS,
        is_long=True,
    ),
    "docs/commands.md#6": Given(run="begun", is_long=True),
    "docs/commands.md#9": Given(
        instead={
            "--epochs 5": "--epochs 1",
            "--rounds 50": "--rounds 2",
            "--clients 1000": "--clients 30",
            "atoll sweep policies.toml": "atoll sweep policies.toml --set rounds=1",
            "audit run.toml --canaries 2000": f"audit run.toml --canaries 2000 {PRIVATE}",
        },
        is_long=True,
    ),
    "docs/configuration.md": Given(codes={"atoll coordinator run.toml --set round.quorum=six --set round.retry=-1": 2}),
    "docs/flower.md": Given(
        instead={
            "--site north --join CODE": "--site north --join $(atoll client invite north)",
            "--site south --join CODE": "--site south --join $(atoll client invite south)",
            "127.0.0.1:7171": "$ADDRESS",
            "--nodes 2": "--nodes 2 --set rounds=1",
        },
        is_long=True,
    ),
    "docs/flower.md#4": Given(
        files={"agent.toml": "--node-config"},
        instead={
            "/opt/supernode/venv/bin/python": sys.executable,
            "--join CODE": "--join $(atoll client invite east --state fleet)",
        },
        is_long=True,
    ),
    "docs/endings.md": Given(run="begun", is_long=True),
    "docs/experiments.md": Given(
        files={"policies.toml": "[grid]"},
        instead={
            "seed = [1, 2, 3]": "seed = [1]",
            "atoll sweep policies.toml": "atoll sweep policies.toml --set rounds=1",
            "--rounds 40": "--rounds 2",
        },
        is_long=True,
    ),
    "docs/faults.md": Given(
        instead={
            "--seeds 1000 ": "--seeds 20 ",
            "--site north": f"--site north {NORTH}",
        },
        is_long=True,
    ),
    "docs/identity.md": Given(
        run="hosted", instead={"--join CODE": NORTH, "atoll join CODE": f"atoll join {OPERATOR}"}
    ),
    "docs/identity.md#4": Given(instead=ELSEWHERE, before=AUTHORITY_DIALS),
    "docs/planning.md": Given(
        files={"plan.toml": "[cluster]"},
        instead={"llama-8b --cluster h100-80 --batch 64 --dry-run 0,7": SMALL_PLAN},
        is_long=True,
    ),
    "docs/privacy.md": Given(),
    "docs/policy.md": Given(run="hosted", instead={"--join CODE": NORTH}),
    "docs/populations.md": Given(files={"run.toml": "[population]"}, is_long=True),
    "docs/postgresql.md": Given(instead={"postgresql://atoll@db.example.org/atoll": "$DATABASE"}, is_long=True),
    "docs/postgresql.md#2": Given(
        instead={"postgresql://atoll@db/atoll": "$DATABASE"},
        before={"atoll coordinator": ("atoll coordinator run.toml --database $DATABASE",)},
        is_long=True,
    ),
    "docs/running.md": Given(
        instead={
            "/srv/atoll": "srv",
            "run.toml --aggregators 4": "run.toml --aggregators 4 --state ranked",
            "atoll client invite north": "atoll client invite north --state ranked",
            "--join CODE": "--join $(atoll client invite north --state ranked)",
        },
        is_long=True,
    ),
    "docs/running.md#2": Given(run="hosted", instead=DELETED, is_long=True),
    "docs/running.md#3": Given(is_long=True),
    "docs/running.md#4": Given(run="hosted", is_long=True),
    "docs/simulation.md": Given(
        instead={
            "--rounds 20": "--rounds 2",
            "atoll sweep examples/policies.toml": "atoll sweep examples/policies.toml --set rounds=1",
        },
        is_long=True,
    ),
    "docs/statistics.md": Given(
        instead={"--join CODE": NORTH},
        before={
            "atoll run statistics run.toml": ("until atoll run statistics run.toml; do sleep 0.2; done",)
        },  # north may have enrolled, and not be connected yet
        is_long=True,
    ),
    "docs/task.md": Given(instead={"--rounds 5": "--rounds 2", "--epochs 5": "--epochs 1"}, is_long=True),
    "docs/training.md": Given(instead={"--epochs 24": "--epochs 1", **FEW_STEPS}, is_long=True),
    "examples/batch_size.py": Given(
        instead={
            "-m examples.batch_size --batches 16,64,256 --target 0.95": "-m examples.batch_size",
            "-m examples.batch_size": f"-m examples.batch_size {SMALL_BATCHES}",
        },
        is_long=True,
    ),
    "examples/digits.py": Given(instead={"--join CODE": NORTH}, is_long=True),
    "examples/horovod_style.py": Given(is_long=True),
    "examples/iris_sklearn.py": Given(),
    "examples/mnist.py": Given(instead={"--rounds 100": "--rounds 2"}, is_long=True),
    "examples/scanners.py": Given(instead={"--join CODE": NORTH}, is_long=True),
    "examples/shakespeare.py": Given(),
    "examples/stdlib_lm.py": Given(instead=FEW_STEPS, is_long=True),
    "examples/synthetic.py": Given(instead={"--rounds 50": "--rounds 2"}, is_long=True),
    "examples/table.py": Given(),
    "examples/tumours_sklearn.py": Given(is_long=True),
    "examples/tumours_xgboost.py": Given(is_long=True),
}
