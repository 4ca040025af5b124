"""The settings of the processes: the coordinator and the aggregation ranks."""

from collections.abc import Iterator
from itertools import combinations
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from atoll.protocol.settings import STRICT, Folder
from atoll.protocol.wire.channel import Address, bracketed, is_wildcard, loopback_only, parse_address
from atoll.server.config.database_url import DatabaseUrl
from atoll.server.rounds.policy import Seconds, SecondsOrNone

PORT_MAX = 65535

_WITHOUT_NAME = "listen {} is every interface: say in `public` by which name or address others reach this machine"

_NO_NEXT_PORT = "listen {} has no next port, where those with a join code would become members: name one in `enrol`"

_JOINS_NOBODY = "insecure and a join code: an insecure rank proves nothing, the code would not be used: leave one out"


def _host(host: str) -> str:
    try:
        if host:
            parse_address(f"{bracketed(host)}:1")
    except ValueError:  # it would speak of a port, which is what is too much here, more often than not
        raise ValueError("allowed: a name, an IPv4 or an IPv6 address; without a port, and without https://") from None
    return host


def _clash(one: str, other: str) -> bool:
    """Whether two addresses are the same port of the same interface; port 0 is never another's."""
    (host, port), (other_host, other_port) = parse_address(one), parse_address(other)
    is_same_host = _plain(host) == _plain(other_host) or is_wildcard(one) or is_wildcard(other)
    return port == other_port != 0 and is_same_host


def _plain(host: str) -> str:
    return "127.0.0.1" if host.lower() == "localhost" else host.lower()


class CoordinatorConfig(BaseModel):
    """The coordinator's process, whatever runs it hosts."""

    model_config = STRICT

    listen: Address = "127.0.0.1:7070"
    """host:port to serve clients and aggregation ranks on; port 0: the system chooses. "0.0.0.0:7070" is every
    interface."""

    admin: Address = "127.0.0.1:0"
    """host:port for the operator's commands; port 0: the system chooses. Those on this machine find it by the state
    directory."""

    enrol: Address | Literal[""] = ""
    """host:port where those with a join code become members; empty: where `listen` is, at the next port."""

    public: str = ""
    """The name or address by which others reach this machine, for join codes; empty: the host of `listen`."""

    insecure: bool = False
    """Nobody proves who they are, and nothing is encrypted: only on loopback; short is `--insecure`."""

    state: Folder = Field(default="atoll-state", validate_default=True)
    """The directory of everything that must survive: the journal, versions, updates."""

    database: DatabaseUrl = ""
    """Where the journal and the records lie: empty for a file in the state directory (SQLite), or of PostgreSQL
    `postgresql://USER@HOST/DATABASE`, the password better in PGPASSFILE; versions and updates stay in the directory."""
    max_runs: int = Field(default=4, ge=1, le=100)
    """Runs whose rounds may be under way at the same time; further ones are queued, and paused ones do not count."""

    authority: str = ""
    """The directory of the authority that signs all certificates; empty: `identity/authority` in the state directory.
    "elsewhere": its key is on another machine, where `atoll authority serve` signs."""

    certificate_lifetime: Annotated[float, Field(ge=2, le=10 * 366 * 86400, allow_inf_nan=False)] = 30 * 86400.0
    """Seconds that a certificate holds; it is renewed at two thirds of that."""

    lease: Seconds = 30.0
    """Seconds of silence after which a client counts as lost; it may come back."""

    heartbeat: SecondsOrNone = 0.0
    """Seconds between a client's heartbeats; 0: a third of the lease."""

    keep_versions: int = Field(default=5, ge=1, le=1_000_000)
    """Newest versions of the global model that stay on disk; those that a round or a late update needs stay anyway."""

    keep_rounds: int = Field(default=1000, ge=1, le=1_000_000_000)
    """Newest rounds of each run whose records and events stay in the journal."""

    max_connections: int = Field(default=1000, ge=1, le=100_000)
    """Clients that may be connected at once; a further one is turned away and tries again."""

    calls_per_client: int = Field(default=16, ge=4, le=1000)
    """Calls that one client may have open at once, by the name in its certificate; a further one is refused."""

    upload_floor: int = Field(default=16 * 1024, ge=0, le=2**30)
    """Bytes a second: an upload that is slower for more than half a minute is ended, and goes on where it was when the
    client comes again: see limits.md. 0: there is no floor."""

    incoming_max: int = Field(default=0, ge=0, le=2**60)
    """Bytes of uploads that are not accepted yet, for each run; further ones are put off. 0: no limit but the disk."""

    disk_free_min: int = Field(default=64 * 2**20, ge=2**20, le=2**60)
    """Bytes of the disk that no upload may use up: the journal needs some to go on."""

    aggregators: int = Field(default=0, ge=0, le=64)
    """Ranks of the aggregation, each with a port of its own for updates and versions; 0: this process does it alone.
    Fixed for a run: every rank keeps its part of each version."""

    start_aggregators: bool = True
    """Whether this process starts the ranks, on this machine; otherwise you start each with `atoll aggregator`."""

    aggregator_patience: Seconds = 600.0
    """Seconds that a rank may be away while a round is folded; then the round is abandoned."""

    @property
    def enrol_address(self) -> str:
        """host:port where those with a join code become members."""
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

    @field_validator("public")
    @classmethod
    def _public_is_a_host(cls, public: str) -> str:
        return _host(public)

    @model_validator(mode="after")
    def _addresses_suit(self) -> "CoordinatorConfig":
        if self.insecure:
            for address in (self.listen, self.admin):
                loopback_only(address)
        elif not self.enrol and parse_address(self.listen)[1] == PORT_MAX:
            raise ValueError(_NO_NEXT_PORT.format(self.listen))
        elif not self.public and any(map(is_wildcard, (self.listen, self.enrol_address))):
            raise ValueError(_WITHOUT_NAME.format(self.listen))
        if faults := list(self._clashes()):
            raise ValueError("; ".join(faults))
        return self

    def _clashes(self) -> Iterator[str]:
        """The ports that would be taken twice; who is insecure has none for members."""
        ports = {"listen": self.listen, "admin": self.admin}
        if not self.insecure:
            ports["enrol" if self.enrol else "enrol (the port after listen)"] = self.enrol_address
        for (name, address), (other, other_address) in combinations(ports.items(), 2):
            if _clash(address, other_address):
                yield f"{name} {address} and {other} {other_address} are the same port: give each its own"


class AggregatorConfig(BaseModel):
    """One rank of the aggregation, as a process of its own."""

    model_config = STRICT

    coordinator: Address | Literal[""] = ""
    """host:port of the coordinator; empty: where it said at enrolment."""

    join: str = Field(default="", max_length=4096, repr=False, exclude=True)
    """The join code, needed once: `atoll client invite N --role aggregator` prints it."""

    insecure: bool = False
    """Prove nothing and encrypt nothing: the coordinator does so, too, on this machine."""

    rank: int = Field(ge=0, le=63)
    """Which rank it is, from 0."""

    ranks: int = Field(ge=1, le=64)
    """How many there are: the coordinator's `aggregators`."""

    listen: Address = "127.0.0.1:0"
    """host:port of the data plane; port 0: that of the last time, or the system chooses."""

    public: str = ""
    """The name or address by which clients reach this machine; empty: the host of `listen`."""

    state: Folder
    """The rank's own directory: the updates of its clients, its part of each version."""

    interface: str = "lo"
    """The network interface over which the ranks exchange sums, unencrypted: loopback unless you name another."""

    max_connections: int = Field(default=1000, ge=1, le=100_000)
    """Clients that may be connected at once: as the coordinator's, which gives its own to the ranks that it starts."""

    @model_validator(mode="after")
    def _rank_is_one_of_them(self) -> "AggregatorConfig":
        if self.rank >= self.ranks:
            raise ValueError(f"rank {self.rank} is not in 0..{self.ranks - 1}")
        return self

    @field_validator("public")
    @classmethod
    def _public_is_a_host(cls, public: str) -> str:
        return _host(public)

    @model_validator(mode="after")
    def _addresses_suit(self) -> "AggregatorConfig":
        if self.insecure:
            for address in filter(None, (self.coordinator, self.listen)):
                loopback_only(address)
            if self.join:
                raise ValueError(_JOINS_NOBODY)
        elif is_wildcard(self.listen) and not self.public:
            raise ValueError(_WITHOUT_NAME.format(self.listen))
        return self


class HostFile(BaseModel):
    """What `atoll coordinator` reads when it starts no run of its own: nothing but its own table."""

    model_config = STRICT

    coordinator: CoordinatorConfig = CoordinatorConfig()
    """The coordinator's process."""
