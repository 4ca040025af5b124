"""The requests of the operations: each parameter is declared once, with its help text.

A command has an argument or option for each field that is a `Param` (`atoll.cli.requested`).
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

if TYPE_CHECKING:
    from atoll.simulations.federation.config import SimulationFile


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a request, as the command line shows it."""

    help: str
    metavar: str = ""
    flag: str = ""
    """The option where it is not that of the field's name; of an argument, `ARGUMENT`."""
    least: int | None = None
    """The least value."""


ARGUMENT = "argument"

SET = Param("Override one setting; repeatable. `atoll settings` lists all.", "KEY=VALUE", "--set")
DROP_EMPTY = Param(
    "Leave out clients without any training example, instead of refusing them; short for population.drop_empty."
)

Overrides = Annotated[Sequence[str], SET]
DropEmpty = Annotated[bool, DROP_EMPTY]
Exports = Annotated[
    Sequence[str],
    Param(
        "Also export the run while it runs: tensorboard, mlflow, wandb or jsonl, and its folder or address; by "
        "default a folder of the tool's name in the run's. Repeatable. `atoll export` does the same later.",
        "TOOL[:PLACE]",
        "--export",
    ),
]
Columns = Annotated[
    str | None,
    Param(
        "Columns of the table, separated by commas, such as best or best@clients/loss; by default sweep.columns.",
        "A,B",
    ),
]
By = Annotated[
    str | None,
    Param(
        "Compare the runs at the largest place on an axis that all have reached: updates, bytes, time (virtual), "
        "rounds or seconds.",
        "AXIS",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateRequest:
    """A federation to simulate."""

    what: Annotated[
        str | None,
        Param(
            "A task (`module:attribute` or `path/to/file.py:attribute`) to run with the defaults, or a run's TOML, as "
            "for a deployed run; it may also have the tables population, devices, attack and simulation.",
            "[TASK | RUN.toml]",
            ARGUMENT,
        ),
    ]
    rounds: Annotated[int | None, Param("Rounds of the run; short for rounds.", "N")] = None
    clients: Annotated[
        int | None,
        Param(
            "Simulated clients, with an iid split of the data unless population.kind is set; short for "
            "population.clients. Of a Flower app: the number of its nodes.",
            "N",
        ),
    ] = None
    drop_empty: DropEmpty = False
    engine: Annotated[str | None, Param("Engine of the local training; short for simulation.engine.", "NAME")] = None
    out: Annotated[Path | None, Param("The folder of the run; by default atoll-sim-NAME.", "DIR")] = None
    overrides: Overrides = ()
    seed: Annotated[int | None, Param("Seed of the run; short for seed.", "N")] = None
    fresh: Annotated[
        bool, Param("Refuse a folder that has a run already, instead of resuming the run.", "", "--fresh/--resume")
    ] = False
    exports: Exports = ()
    unnamed: str = "atoll-sim-{name}"
    """The template of the folder's name if `out` is None."""

    def folder(self, file: "SimulationFile") -> Path:
        """Return the folder of the run."""
        return self.out or Path(self.unnamed.format(name=file.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """A task to train federated and centralized, or finished runs to compare."""

    what: Annotated[
        Sequence[str],
        Param(
            "A task, or the TOML of a simulated run, as for `atoll simulate`; or the folders of simulated runs or "
            "of sweeps, which are compared without training.",
            "TASK | RUN.toml | DIR...",
            ARGUMENT,
        ),
    ]
    rounds: Annotated[int | None, Param("Rounds of the federated run; short for rounds.", "N")] = None
    clients: Annotated[
        int | None,
        Param("Clients of the federated run, with an iid split of the data unless population.kind is set.", "N"),
    ] = None
    drop_empty: DropEmpty = False
    epochs: Annotated[
        int | None,
        Param(
            "Epochs of the centralized training; by default the federated run's number of passes over all data.", "N"
        ),
    ] = None
    metric: Annotated[
        str | None,
        Param("The metric to compare, such as server/accuracy; by default the first one.", "GROUP/NAME"),
    ] = None
    target: Annotated[float | None, Param("Value of the metric: also report the cost of reaching it.", "X")] = None
    out: Annotated[Path | None, Param("The folder of both trainings; by default atoll-compare-NAME.", "DIR")] = None
    overrides: Overrides = ()
    by: By = None
    columns: Columns = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """A grid of settings to simulate."""

    grid_file: Annotated[
        Path, Param("A run's TOML with a table \\[grid]; docs/experiments.md has an example.", "GRID", ARGUMENT)
    ]
    out: Annotated[Path | None, Param("The folder of all cells; by default atoll-sweep-NAME.", "DIR")] = None
    jobs: Annotated[int | None, Param("Number of runs at a time; by default sweep.jobs.", "N", least=1)] = None
    metric: Annotated[
        str | None,
        Param("The metric of the table, such as server/accuracy; by default sweep.metric.", "GROUP/NAME"),
    ] = None
    target: Annotated[float | None, Param("Value of the metric to reach; by default sweep.target.", "X")] = None
    columns: Columns = None
    by: By = None
    drop_empty: DropEmpty = False
    overrides: Overrides = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """A centralized training on the pooled data of all sites."""

    task: Annotated[str, Param("The task, `module:attribute` or `path/to/file.py:attribute`.", "TASK", ARGUMENT)]
    nproc: Annotated[
        int | None,
        Param("Ranks to start on this machine; without it, train in this process, as one rank under `torchrun`.", "N"),
    ] = None
    mesh: Annotated[
        str | None,
        Param(
            "Degrees of the axes pp, dp_replicate, dp_shard and tp, as in dp=2,tp=2; dp is dp_replicate, or dp_shard "
            "with ZeRO; auto: the planner's choice for the model and the ranks' memory. By default dp is the number "
            "of ranks.",
            "AXES",
        ),
    ] = None
    zero: Annotated[int | None, Param("ZeRO stage 1, 2 or 3; short for plan.zero.", "STAGE")] = None
    epochs: Annotated[int | None, Param("Passes over the data; short for train.epochs.", "N")] = None
    steps: Annotated[int | None, Param("Optimizer steps; short for train.steps.", "N")] = None
    out: Annotated[Path | None, Param("The folder of the training; by default atoll-train-NAME.", "DIR")] = None
    device: Annotated[str, Param("Kind of device: cpu, cuda, or auto (cuda where there is a GPU).", "KIND")] = "auto"
    overrides: Overrides = ()
    fresh: Annotated[
        bool,
        Param("Refuse a folder that is not empty, instead of resuming from its checkpoint.", "", "--fresh/--resume"),
    ] = False
    exports: Exports = ()
    max_restarts: Annotated[int, Param("Times that all ranks restart after one has died; only with --nproc.", "N")] = 3

    @property
    def folder(self) -> Path:
        """The folder of the training."""
        from atoll.task.task import task_name

        return self.out or Path(f"atoll-train-{task_name(self.task).removesuffix(':task').replace(':', '-')}")

    def encode(self) -> str:
        """Return the request as text, for a rank."""
        return json.dumps({**dataclasses.asdict(self), "out": str(self.folder)})

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the request that `encode` has written."""
        fields = json.loads(text)
        return cls(**{**fields, "out": Path(fields["out"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A model, a cluster and a training, for which meshes are predicted."""

    model: Annotated[
        str,
        Param(
            "A preset (gpt2, gpt2-xl, bert-large, turing-nlg, gpt3, llama-1b, llama-8b, llama-70b, llama-405b, "
            "qwen2.5-0.5b, qwen2.5-7b, qwen2.5-72b), numbers (layers=32,hidden=4096,heads=32,vocab=32000), "
            "a preset with other numbers (llama-8b,sequence=4096), "
            "or a TOML with the tables model, cluster and training.",
            "MODEL",
            ARGUMENT,
        ),
    ]
    cluster: Annotated[
        str | None,
        Param(
            "A preset (a100-80, h100-80, h200-141, cpu: one node each), or one with other numbers: "
            "h100-80,nodes=8; or nodes, per_node, memory (bytes), flops and flops_fp32 (FLOP/s), bandwidth (bytes/s of "
            "the memory), inside and across (bytes/s, in a node and between nodes); by default h100-80.",
            "CLUSTER",
        ),
    ] = None
    batch: Annotated[int | None, Param("Sequences in one step, over all devices; by default 8 a device.", "N")] = None
    mesh: Annotated[str | None, Param("Only this mesh, such as pp=4,dp=4,tp=4; by default all meshes.", "MESH")] = None
    precision: Annotated[str | None, Param("Precision of matrix products; by default bf16.", "bf16|fp32")] = None
    optimizer: Annotated[
        str | None,
        Param("Optimizer: sgd, momentum, novograd, adam, adamw or lamb; by default adamw.", "NAME"),
    ] = None
    count: Annotated[
        str | None,
        Param(
            "Accounting of memory: this engine's, or a convention of the literature; by default engine.",
            "engine|lecture|zero-paper",
        ),
    ] = None
    dry_run: Annotated[
        str,
        Param(
            "Also build these ranks of the fastest plan with the engine, on meta tensors and without a network, run "
            "one step, and show its memory and traffic beside the prediction.",
            "RANK,...",
        ),
    ] = ""
    client: Annotated[
        bool,
        Param(
            "Also show the needs of a federated site that trains by the fastest plan: memory of each rank, disk, "
            "bytes up and down, and their seconds."
        ),
    ] = False
    line: Annotated[
        str | None, Param("The site's line, such as 100Mbit; by default 1Gbit. With --client.", "SPEED")
    ] = None
    codec: Annotated[str | None, Param("Codec of the update; by default none. With --client.", "NAME")] = None
    lora: Annotated[
        int | None,
        Param(
            "Rank of LoRA adapters on every matrix of the blocks; only they are exchanged. By default the whole model "
            "is. With --client.",
            "RANK",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyPlanRequest:
    """A mechanism of differential privacy, of which one number is asked from the others."""

    delta: Annotated[
        float | None, Param("The probability with which epsilon may fail; far below 1 / number of clients.", "D")
    ] = None
    epsilon: Annotated[
        float | None, Param("The budget: the noise multiplier that keeps it, or how many uses keep it.", "E")
    ] = None
    noise_multiplier: Annotated[
        float | None,
        Param("Standard deviation of the noise of a sum, in clip norms: its epsilon.", "Z"),
    ] = None
    unit: Annotated[
        str, Param("What is protected: all that one client contributes, or one of its examples.", "client|example")
    ] = "client"
    clip_norm: Annotated[float, Param("Largest norm of one contribution.", "C")] = 1.0
    uses: Annotated[
        int | None, Param("Most rounds with the same client; by default all rounds. With --unit client.", "N")
    ] = None
    rounds: Annotated[int | None, Param("Rounds of the run. With --unit client.", "N")] = None
    spent: Annotated[
        int, Param("Uses of one client so far, by the same noise: they leave fewer. With --unit client.", "N")
    ] = 0
    mechanism: Annotated[
        str,
        Param("The noise of a round, independent of other rounds or correlated with them.", "gaussian|correlated"),
    ] = "gaussian"
    separation: Annotated[
        int | None, Param("Least distance of two rounds with the same client. With --mechanism correlated.", "N")
    ] = None
    cohort_size: Annotated[
        int | None, Param("Clients of a round, by which a sum is divided: what the noise does to the mean.", "N")
    ] = None
    values: Annotated[int | None, Param("Numbers in an update. With --cohort-size.", "D")] = None
    clients: Annotated[
        int | None, Param("Clients that may take part: the rounds that their budgets allow together.", "N")
    ] = None
    quorum: Annotated[
        int | None,
        Param("Fewest updates of a round; by default --cohort-size: what dropouts do to the mean.", "N"),
    ] = None
    noise_by: Annotated[
        str,
        Param("The party that adds the noise; the clients do inside their secure sums.", "coordinator|clients"),
    ] = "coordinator"
    honest_min: Annotated[
        int | None,
        Param(
            "Fewest honest members of a sum, each of which adds 1/N of the variance; by default the members that open "
            "a sum, less --colluders. With --noise-by clients.",
            "N",
        ),
    ] = None
    colluders: Annotated[
        int | None,
        Param("Members that may tell the coordinator their shares; by default 1. With --noise-by clients.", "N"),
    ] = None
    bits: Annotated[int | None, Param("Bits of a word of a secure sum: 32 or 64. With --noise-by clients.", "N")] = None
    sample_rate: Annotated[float | None, Param("Probability of an example in a step. With --unit example.", "Q")] = None
    steps: Annotated[int | None, Param("Steps of one site in all. With --unit example.", "N")] = None
    simulate: Annotated[
        str | None,
        Param(
            "Also simulate this task, or this run's TOML, with the plan and without privacy: what the noise costs. A "
            "smaller cohort, by --set round.cohort_size, has the noise of the plan's.",
            "TASK | RUN.toml",
        ),
    ] = None
    overrides: Overrides = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyAuditRequest:
    """A private run or training, whose claim canaries try to refute."""

    what: Annotated[
        str,
        Param(
            "A task, with its mechanism in `--set privacy.*` (`privacy.unit=example` as for `atoll train`, else "
            "clients), or a run's TOML with a table \\[privacy].",
            "TASK | RUN.toml",
            ARGUMENT,
        ),
    ]
    canaries: Annotated[
        int, Param("Number of canaries: as many as the model has values, or half of the examples, at most.", "N")
    ] = 1000
    overrides: Overrides = ()
