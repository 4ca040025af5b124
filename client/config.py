"""The settings of an agent, the process at a data owner's site.

The string under a field is its documentation; `docs/configuration.md` is generated from these strings.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from atoll.client.crew_config import CrewConfig
from atoll.protocol.identity.names import is_name
from atoll.protocol.notices.settings import NotifyConfig
from atoll.protocol.settings import STRICT, Folder, Plain
from atoll.protocol.wire.channel import Address, check_stays_here, loopback_only

Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


class AgentConfig(BaseModel, **STRICT):
    """The settings of one agent: its site, its coordinator, the resources that it may use."""

    dotted_names: ClassVar[Mapping[str, int]] = {"task": 0}

    site: str
    """Name of the data owner, one of the task's sites; also the name of the client at the coordinator."""

    join: str = Field(default="", max_length=4096, repr=False, exclude=True)
    """Join code, needed once; `atoll client invite NAME` prints it. Afterwards the agent uses the credential in
    `state`."""

    coordinator: Address | Literal[""] = ""
    """Address of the coordinator, host:port. Empty: the address from the enrolment; with `insecure` 127.0.0.1:7070."""

    insecure: bool = False
    """Connect without TLS, to a coordinator on this machine that does the same. Short form: `--insecure`."""

    state: Folder = Field(default="atoll-agent", validate_default=True)
    """State directory, one for each agent: its credential, its models, and the spool of finished updates that the
    coordinator has not answered yet."""

    task: dict[str, Plain] = {}
    """The site's own values for its tasks' `settings`, such as `file = "patients.csv"`: they never leave this machine.
    The task itself resolves a relative path in them. Each task takes the names that it declares; a name that none of
    them declares is refused."""

    python: Folder | None = None
    """Interpreter of the training process, such as "/opt/site/venv/bin/python": a virtual environment of the site with
    its own versions of the task's libraries. It needs Python 3.11 or newer, numpy and safetensors; Atoll need not be
    installed there; absent: the interpreter of the agent."""

    policy: Folder | None = None
    """The site's own policy, a TOML file that is read again whenever it changes (docs/policy.md); absent: all tasks
    that the agent was started with are allowed."""

    label: str = Field(default="", max_length=64)
    """Stratum of this client, for stratified sampling."""

    reread: Literal["run", "job", "never"] = "run"
    """Reading of the task's data by the training process: "run": at the first job of a run, and again when a finished
    run is resumed; all other jobs of the run use the rows read first. "job": at every job, so that a row which the site
    adds or withdraws counts from the next job on; "never": once in the life of the process."""

    threads: int = Field(default=0, ge=0, le=4096)
    """Threads of the training process; 0: the number that torch chooses."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the training; "auto": a GPU if there is one."""

    load_timeout: Seconds = 120.0
    """Seconds within which the training process must have started and loaded the task, its imports included."""

    lease: Seconds = 30.0
    """Seconds that the training process may outlive its deadline before the agent kills it. Loss of the connection
    alone never ends a training."""

    crew: CrewConfig = CrewConfig()
    """Mesh of ranks that trains here in place of one process (docs/large-clients.md)."""

    reconnect_min: Seconds = 0.2
    """Seconds before the first attempt to reconnect; they double with each further attempt, with jitter."""

    reconnect_max: Seconds = 15.0
    """Longest wait between two attempts to reconnect [s]. While another agent uses this site's name, it is the first
    wait, which then grows to 120 s."""

    upload_limit: int = Field(default=0, ge=0, le=2**40)
    """Rate of all uploads together [bytes/s]; 0: no limit."""

    spool_max_bytes: int = Field(default=8 * 2**30, ge=2**20, le=2**50)
    """Disk space that the spool may use [bytes]; an update that does not fit is given up as `disk_full`."""

    notify: NotifyConfig = NotifyConfig()
    """Operator whom the agent notifies."""

    metrics: Address | Literal[""] = ""
    """host:port, on loopback, of the agent's [metrics](monitoring.md) for Prometheus; empty: off, and the agent sends
    none. Short form: `--metrics`."""

    exit_when_done: bool = False
    """End the agent when its runs have ended and the spool is empty, instead of waiting for the next run."""

    @field_validator("site")
    @classmethod
    def _site_is_a_name(cls, site: str) -> str:
        if not is_name(site):
            raise ValueError(
                "allowed: 1 to 64 of the characters A-Z, a-z, 0-9, ., _ and -; the first is a letter or a digit"
            )
        return site

    @model_validator(mode="after")
    def _waits_are_in_order(self) -> "AgentConfig":
        if self.reconnect_min > self.reconnect_max:
            raise ValueError(f"reconnect_min {self.reconnect_min} is more than reconnect_max ({self.reconnect_max})")
        return self

    @model_validator(mode="after")
    def _ranks_are_of_this_interpreter(self) -> "AgentConfig":
        if self.python is not None and self.crew.mesh:
            raise ValueError(
                f"python {str(self.python)!r} and crew.mesh {self.crew.mesh!r}: the ranks of a crew run in the agent's "
                "own environment: install the task's libraries there, and leave python out"
            )
        return self

    @model_validator(mode="after")
    def _metrics_stay_here(self) -> "AgentConfig":
        if self.metrics:
            check_stays_here(self.metrics)
        return self

    @model_validator(mode="after")
    def _insecure_stays_here(self) -> "AgentConfig":
        if self.insecure and self.coordinator:
            loopback_only(self.coordinator)
        if self.insecure and self.join:
            raise ValueError(
                "insecure and a join code: an insecure agent proves nothing, the code would not be used: leave one out"
            )
        return self
