"""The settings of a crew, the ranks of a mesh that train one client in place of one process.

The string under a field is its documentation; `docs/configuration.md` is generated from these strings.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from atoll.ground.faults import Refused, faults_in
from atoll.ground.printable import count_of
from atoll.parallel.engine.plan import AUTO, Plan, given_plan, possible_plans
from atoll.parallel.mesh_client.supervisor.interval import ALLOWED, Interval
from atoll.protocol.settings import STRICT, Folder, Plain

Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]

FIELDS = ("nproc", "nodes", "num_ranks", "folder", "rendezvous", "python")
"""The names that a `command` may have in braces."""


class CrewConfig(BaseModel, **STRICT):
    """Ranks of one site, which together train one model; absent: one process, as usual."""

    mesh: str = Field(default="", max_length=200)
    """Degrees of the axes pp, dp_replicate, dp_shard and tp, as in "dp_shard=4,tp=2"; dp is dp_replicate, or dp_shard
    with ZeRO. auto: the planner's choice for the task, the memory of the ranks and the optimizer; needs `nproc`. Empty:
    no crew. Short form: `--mesh`."""

    nproc: int = Field(default=0, ge=0, le=1024)
    """Ranks on each machine; 0: the ranks of the mesh, divided by `nodes`. Short form: `--nproc`."""

    nodes: int = Field(default=1, ge=1, le=4096)
    """Machines. More than one share `folder`."""

    launch: Literal["local", "command", "external"] = "local"
    """Launcher of the ranks: local (the agent, on this machine), command (the agent runs `command`, such as srun with
    torchrun), or external (another system, such as Kubernetes or Ray; the ranks dial the agent)."""

    command: list[str] = []
    """Program and arguments that start all ranks, with launch = "command". Replaced in them: {nproc}, {nodes},
    {num_ranks}, {folder}, {python}, and {rendezvous}, HOST:PORT of this machine with a free port."""

    folder: Folder | None = None
    """Folder that the agent and all ranks share; absent: a folder of `state`."""

    listen: str = Field(default="", max_length=300)
    """HOST:PORT at which rank 0 of another machine dials the agent; port 0: any free one. Empty: a socket of this
    machine with launch = "local", any port of this host otherwise."""

    checkpoint_every: str = "300 s"
    """Time between two checkpoints within a round, from which restarted ranks continue: a number with a unit, s, min, h
    or steps, as in "5 min" or "50 steps". "0": they restart the round."""

    max_restarts: int = Field(default=3, ge=0, le=1000)
    """Restarts of the ranks in one job after a rank was lost; with one loss more the job fails."""

    collective_timeout: Seconds = 120.0
    """Seconds that a rank waits for the others; a rank is then considered hung, and all ranks start again."""

    plan: dict[str, Plain] = {}
    """Other settings of the plan, as `atoll train` takes them in plan.*: precision, zero, recompute and so on."""

    @field_validator("checkpoint_every", mode="before")
    @classmethod
    def _has_a_unit(cls, given: object) -> str:
        text = str(given) if type(given) in (int, float) else given
        if not isinstance(text, str):
            raise ValueError(f"got {given!r}; allowed: {ALLOWED}")
        Interval.parse(text)
        return text

    @property
    def num_ranks(self) -> int:
        """The number of ranks on all machines."""
        return self.nproc * self.nodes if self.is_auto else self.parallel.mesh.size

    @property
    def num_here(self) -> int:
        """The number of ranks on each machine."""
        return self.nproc or self.num_ranks // self.nodes

    @property
    def is_auto(self) -> bool:
        """Whether the planner chooses the mesh."""
        return self.mesh == AUTO

    @property
    def parallel(self) -> Plan:
        """Plan of the ranks; None if the planner chooses it."""
        return given_plan(self.mesh, self.plan)

    @model_validator(mode="after")
    def _is_a_crew(self) -> "CrewConfig":
        if not self.mesh:
            defaults = {name: field.default for name, field in type(self).model_fields.items()}
            if given := [name for name, default in defaults.items() if getattr(self, name) != default]:
                raise ValueError(f"{', '.join(given)}: settings of a crew without its mesh: add mesh, such as dp=2")
            return self
        faults = list(self._faults_of_launch())
        if self.is_auto and not self.nproc:
            faults.append('mesh = "auto" without nproc: give the number of ranks on each machine')
        try:
            if self.is_auto:
                possible_plans(max(self.num_ranks, 1), self.plan)
            else:
                faults += self._faults_of_numbers(self.parallel.mesh.size)
        except ValueError as error:
            faults += faults_in(error)
        if faults:
            raise Refused(*faults)
        return self

    def _faults_of_launch(self) -> "list[str]":
        faults = []
        if self.launch == "local" and self.nodes > 1:
            faults.append(f'nodes {self.nodes} with launch = "local", of this machine: use "command" or "external"')
        if self.launch == "command" and not self.command:
            faults.append('launch = "command" without command: give the program that starts the ranks, such as srun')
        if self.launch != "command" and self.command:
            faults.append(f'command with launch = "{self.launch}", which runs none: set launch = "command"')
        try:
            for argument in self.command:
                argument.format(**dict.fromkeys(FIELDS, ""))
        except (KeyError, IndexError, ValueError) as error:
            faults.append(f"command: {error} in braces (allowed: {', '.join(FIELDS)}, and for a brace itself {{{{)")
        if self.launch != "local" and self.folder is None:
            faults.append(f'launch = "{self.launch}" without folder: name one that the agent and all ranks share')
        return faults

    def _faults_of_numbers(self, size: int) -> "list[str]":
        if size % self.nodes:
            nodes = count_of(self.nodes, "node")
            return [f"mesh {self.mesh} has {count_of(size, 'rank')}, which {nodes} cannot share evenly"]
        if self.nproc and self.nproc * self.nodes != size:
            there = f"nproc {self.nproc}" + (f" on {count_of(self.nodes, 'node')}" if self.nodes > 1 else "")
            started = self.nproc * self.nodes
            return [f"mesh {self.mesh} has {count_of(size, 'rank')}, and {there} start {started}: make them equal"]
        return []
