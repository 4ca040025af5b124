"""The settings of an agent: the process at a data owner's site.

The string under a field is its documentation; `docs/configuration.md` is held against these strings by a test.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from atoll.protocol.identity.names import is_name
from atoll.protocol.settings import STRICT, Folder
from atoll.protocol.wire.channel import Address, loopback_only

Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


class AgentConfig(BaseModel):
    """One agent: whose data it trains on, where it reports, what it may use."""

    model_config = STRICT

    site: str
    """The data owner's name, one of the task's sites; the coordinator knows the client by it."""

    join: str = Field(default="", max_length=4096, repr=False, exclude=True)
    """The join code, needed once: `atoll client invite NAME` prints it. Afterwards the credential in `state` counts."""

    coordinator: Address | Literal[""] = ""
    """host:port of the coordinator, when it is not where it said at enrolment; with `insecure` 127.0.0.1:7070."""

    insecure: bool = False
    """Prove nothing and encrypt nothing: the coordinator does so, too, on this machine. Short is `--insecure`."""

    state: Folder = Field(default="atoll-agent", validate_default=True)
    """The directory of the spool: finished updates that the coordinator has not acknowledged. One for each agent."""

    policy: Folder | None = None
    """The site's own policy, a TOML file that is read again whenever it changes (docs/policy.md); absent: everything is
    allowed that the agent was started for."""

    label: str = Field(default="", max_length=64)
    """The stratum of this client, for stratified sampling."""

    threads: int = Field(default=0, ge=0, le=4096)
    """Threads that training may use; 0: as many as torch chooses."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is trained; "auto": on a GPU when there is one."""

    lease: Seconds = 30.0
    """Seconds that the training process may outlive its deadline before it is killed. Losing contact alone never
    kills it."""

    reconnect_min: Seconds = 0.2
    """Seconds before the first attempt to connect again; doubled with each further one, with jitter."""

    reconnect_max: Seconds = 15.0
    """The longest wait between two attempts [s]."""

    upload_limit: int = Field(default=0, ge=0, le=2**40)
    """Bytes per second that uploads may use; 0: no limit."""

    spool_max_bytes: int = Field(default=8 * 2**30, ge=2**20, le=2**50)
    """Disk space that the spool may use; an update that does not fit is given up as disk_full."""

    exit_when_done: bool = False
    """Whether the agent ends when the run has ended and the spool is empty, rather than wait for the next run."""

    @field_validator("site")
    @classmethod
    def _site_is_a_name(cls, site: str) -> str:
        if not is_name(site):
            raise ValueError(
                "allowed: 1 to 64 of the characters A-Z, a-z, 0-9, ., _ and -, not beginning with . _ or -"
            )
        return site

    @model_validator(mode="after")
    def _waits_are_in_order(self) -> "AgentConfig":
        if self.reconnect_min > self.reconnect_max:
            raise ValueError(f"reconnect_min {self.reconnect_min} is more than reconnect_max ({self.reconnect_max})")
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
