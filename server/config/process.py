"""The settings of the processes: the coordinator and the aggregation ranks."""

from collections.abc import Iterator
from itertools import combinations
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from atoll.ground.address import bracketed
from atoll.ground.faults import Refused
from atoll.protocol.notices.settings import NotifyConfig
from atoll.protocol.settings import STRICT, Folder
from atoll.protocol.wire.channel import Address, check_stays_here, is_wildcard, loopback_only, parse_address
from atoll.server.config.database_url import DatabaseUrl
from atoll.server.rounds.policy import Seconds, SecondsOrNone

PORT_MAX = 65535

_WITHOUT_NAME = "listen {} is every interface: name in `public` the host or address by which others reach this machine"

_NO_NEXT_PORT = "listen {} has no next port for enrolment: name one in `enrol`"

_NO_ENROLMENT = (
    "insecure and a join code: an insecure rank has no certificate, the code would not be used: leave one out"
)


def _host(host: str) -> str:
    try:
        if host:
            parse_address(f"{bracketed(host)}:1")
    except ValueError:  # its message would ask for a port, which is usually superfluous here
        raise ValueError("allowed: a name, an IPv4 or an IPv6 address; without a port, and without https://") from None
    return host


Host = Annotated[str, AfterValidator(_host)]
"""A host name or address without a port; or empty."""


def _clash(one: str, other: str) -> bool:
    """Return whether two addresses share a port of an interface; port 0 always means a free one."""
    (host, port), (other_host, other_port) = parse_address(one), parse_address(other)
    is_same_host = _plain(host) == _plain(other_host) or is_wildcard(one) or is_wildcard(other)
    return port == other_port != 0 and is_same_host


def _plain(host: str) -> str:
    return "127.0.0.1" if host.lower() == "localhost" else host.lower()


class CoordinatorConfig(BaseModel, **STRICT):
    """Coordinator's process, with any number of runs."""

    listen: Address = "127.0.0.1:7070"
    """host:port for clients and aggregation ranks; port 0: the system chooses. "0.0.0.0:7070" is every interface."""

    admin: Address = "127.0.0.1:0"
    """host:port for the operator's commands; port 0: the system chooses. Commands on this machine find it by the state
    directory."""

    enrol: Address | Literal[""] = ""
    """host:port for enrolment with a join code; empty: the host of `listen`, at the next port."""

    public: Host = ""
    """Host name or address by which others reach this machine, for join codes; empty: the host of `listen`."""

    insecure: bool = False
    """No certificates and no encryption, on loopback only; short form: `--insecure`."""

    state: Folder = Field(default="atoll-state", validate_default=True)
    """Directory of all state that must survive a restart: journal, versions, updates."""

    database: DatabaseUrl = ""
    """Database of the journal and the records: empty for a file in the state directory (SQLite), or PostgreSQL,
    `postgresql://USER@HOST/DATABASE`, the password better in PGPASSFILE. Versions and updates stay in the directory."""

    max_runs: int = Field(default=4, ge=1, le=100)
    """Largest number of runs with rounds under way at the same time; further ones are queued, and paused ones do not
    count."""

    authority: str = ""
    """Directory of the authority that signs all certificates; empty: `identity/authority` in the state directory.
    "elsewhere": its key is on another machine, where `atoll authority serve` signs."""

    certificate_lifetime: Annotated[float, Field(ge=2, le=10 * 366 * 86400, allow_inf_nan=False)] = 30 * 86400.0
    """Seconds that a certificate is valid; it is renewed after two thirds of them."""

    lease: Seconds = 30.0
    """Seconds of silence after which a client counts as lost; it may reconnect later."""

    start_allowance: SecondsOrNone = 300.0
    """Seconds after a restart of the coordinator in which earlier clients may also restart, their imports included:
    until then, or until each has connected once, none counts as lost, and no message of a server program is late."""

    load_timeout: Seconds = 120.0
    """Seconds within which the process that checks and evaluates a run's task must have loaded it, its imports
    included."""

    heartbeat: SecondsOrNone = 0.0
    """Seconds between a client's heartbeats; 0: a third of the lease."""

    keep_versions: int = Field(default=5, ge=1, le=1_000_000)
    """Number of the newest versions of the model kept on disk for runs that do not name a number
    (`model.keep_versions`)."""

    keep_rounds: int = Field(default=1000, ge=1, le=1_000_000_000)
    """Number of the newest rounds of each run whose records and events are kept in the journal."""

    max_connections: int = Field(default=1000, ge=1, le=100_000)
    """Largest number of clients connected at the same time; a further one is refused and retries."""

    calls_per_client: int = Field(default=16, ge=4, le=1000)
    """Largest number of open calls of one client, by the name in its certificate; a further call is refused."""

    upload_floor: int = Field(default=16 * 1024, ge=0, le=2**30)
    """Lowest rate of an upload in bytes a second: a slower one is ended after half a minute, and resumes at the same
    byte when the client tries again (see limits.md). 0: no floor."""

    incoming_max: int = Field(default=0, ge=0, le=2**60)
    """Largest total size of a run's uploads that are not accepted yet [bytes]; further uploads are deferred. 0: no
    limit except the disk."""

    disk_free_min: int = Field(default=64 * 2**20, ge=2**20, le=2**60)
    """Bytes of the disk that uploads leave free, because the journal needs space to continue."""

    aggregators: int = Field(default=0, ge=0, le=64)
    """Number of aggregation ranks, each with its own port for updates and versions; 0: this process aggregates alone.
    Fixed for a run: every rank stores a part of each version."""

    start_aggregators: bool = True
    """Start the ranks from this process, on this machine; otherwise you start each with `atoll aggregator`."""

    aggregator_patience: Seconds = 600.0
    """Seconds that a rank may be away while a round is folded; then the round is abandoned."""

    metrics: Address | Literal[""] = ""
    """host:port of the [metrics](monitoring.md) for Prometheus; port 0: the system chooses; empty: off. On another
    interface than loopback a reader needs a certificate of role owner, operator or auditor. Short form: `--metrics`."""

    health: Address | Literal[""] = ""
    """host:port that answers `grpc.health.v1.Health`, and nothing else, without TLS: for the probes of a kubelet, which
    have none; empty: off. The port for enrolment answers the same over TLS."""

    @property
    def enrol_address(self) -> str:
        """host:port for enrolment."""
        host, port = parse_address(self.listen)
        return self.enrol or f"{bracketed(host)}:{port + 1 if port else 0}"

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between a client's heartbeats."""
        return self.heartbeat or self.lease / 3

    @model_validator(mode="after")
    def _lease_outlives_heartbeats(self) -> "CoordinatorConfig":
        if self.heartbeat >= self.lease:
            raise ValueError(f"heartbeat {self.heartbeat} is not less than lease ({self.lease})")
        return self

    @model_validator(mode="after")
    def _addresses_suit(self) -> "CoordinatorConfig":
        if self.insecure:
            for address in filter(None, (self.listen, self.admin, self.metrics, self.health)):
                loopback_only(address)
        elif not self.enrol and parse_address(self.listen)[1] == PORT_MAX:
            raise ValueError(_NO_NEXT_PORT.format(self.listen))
        elif not self.public and any(map(is_wildcard, (self.listen, self.enrol_address))):
            raise ValueError(_WITHOUT_NAME.format(self.listen))
        if faults := list(self._clashes()):
            raise Refused(*faults)
        return self

    def _clashes(self) -> Iterator[str]:
        """Yield the pairs of equal ports; an insecure coordinator has no port for enrolment."""
        ports = {"listen": self.listen, "admin": self.admin}
        ports |= {name: each for name, each in (("metrics", self.metrics), ("health", self.health)) if each}
        if not self.insecure:
            ports["enrol" if self.enrol else "enrol (the port after listen)"] = self.enrol_address
        for (name, address), (other, other_address) in combinations(ports.items(), 2):
            if _clash(address, other_address):
                yield f"{name} {address} and {other} {other_address} are the same port: give each a different one"


class AggregatorConfig(BaseModel, **STRICT):
    """Aggregation rank as a separate process."""

    coordinator: Address | Literal[""] = ""
    """host:port of the coordinator; empty: the address received at enrolment."""

    join: str = Field(default="", max_length=4096, repr=False, exclude=True)
    """Join code, needed once: `atoll client invite N --role aggregator` prints it."""

    insecure: bool = False
    """No certificates and no encryption, for an insecure coordinator on this machine."""

    rank: int = Field(ge=0, le=63)
    """Number of this rank, from 0."""

    ranks: int = Field(ge=1, le=64)
    """Number of all ranks: the coordinator's `aggregators`."""

    listen: Address = "127.0.0.1:0"
    """host:port of the data plane; port 0: the port of the last start, initially one that the system chooses."""

    public: Host = ""
    """Host name or address by which clients reach this machine; empty: the host of `listen`."""

    state: Folder
    """State directory of this rank: the updates of its clients, its part of each version."""

    interface: str = "lo"
    """Network interface over which the ranks exchange sums, unencrypted; loopback unless another one is named."""

    max_connections: int = Field(default=1000, ge=1, le=100_000)
    """Largest number of clients connected at the same time. The coordinator passes its value to the ranks that it
    starts."""

    metrics: Address | Literal[""] = ""
    """host:port, on loopback, of this rank's [metrics](monitoring.md) for Prometheus; empty: off. Short form:
    `--metrics`."""

    @model_validator(mode="after")
    def _rank_is_one_of_them(self) -> "AggregatorConfig":
        if self.rank >= self.ranks:
            raise ValueError(f"rank {self.rank} is not in 0..{self.ranks - 1}")
        return self

    @model_validator(mode="after")
    def _metrics_stay_here(self) -> "AggregatorConfig":
        if self.metrics:
            check_stays_here(self.metrics)
        return self

    @model_validator(mode="after")
    def _addresses_suit(self) -> "AggregatorConfig":
        if self.insecure:
            for address in filter(None, (self.coordinator, self.listen)):
                loopback_only(address)
            if self.join:
                raise ValueError(_NO_ENROLMENT)
        elif is_wildcard(self.listen) and not self.public:
            raise ValueError(_WITHOUT_NAME.format(self.listen))
        return self


class HostFile(BaseModel, **STRICT):
    """TOML file of `atoll coordinator` without a run: only the coordinator's table."""

    coordinator: CoordinatorConfig = CoordinatorConfig()
    """The coordinator's process."""

    notify: NotifyConfig = NotifyConfig()
    """Notification of the operator."""
