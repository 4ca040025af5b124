"""The settings of a simulated run: the settings of a deployed run, and additional ones for its clients."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from atoll.protocol.settings import STRICT, Plain
from atoll.server.config.run import RunFile
from atoll.simulations.attacks.config import AttackConfig
from atoll.simulations.devices.config import DeviceConfig
from atoll.simulations.populations.config import PopulationConfig

OF_A_COORDINATOR = ("coordinator.lease",)
"""Settings of the coordinator's table that a simulation uses, too."""

EngineName = Literal["auto", "sequential", "processes", "batched", "ray"]


class SimulationConfig(BaseModel, **STRICT):
    """Computation of the clients' training on this machine: engines decide alike, with different rounding."""

    engine: EngineName = "auto"
    """Engine that trains the clients. "sequential": one client after the other, in this process, with the bits of a
    deployed client. "processes": the same in several processes. "batched": many clients in one matrix product. "ray":
    on several machines. "auto": the fastest of the first three in a short measurement."""

    workers: Annotated[int, Field(ge=0, le=4096)] = 0
    """Number of processes that train; 0: the number of cores."""

    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Threads of each process; processes of Ray have one. With more than one, bits may differ from run to run, and each
    process of several unpickles the task, which is impossible for a task of lambdas."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device on which the models compute."""

    devices: list[Annotated[int, Field(ge=0, le=1023)]] = []
    """GPUs that the processes use in turn with `device = "cuda"`, by the numbers that torch gives them; more processes
    than GPUs share them. Empty: all that are visible. On a Ray cluster each process has a share of a GPU, all GPUs over
    all processes."""

    ray_address: str | None = None
    """Address of the cluster for "ray"; absent: a local one is started."""

    secure: Literal["fast", "real"] = "fast"
    """Sums of a run with `[secure]`. "fast": the sum of the clients' encoded updates. "real": with the keys, masks and
    shares of a deployed session. Both have the same sessions and end with the same bits; neither protects anything."""

    noise_cohort_size: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """For research, without any guarantee: the clients of the cohort whose noise the sums of a private run have, in
    place of `round.cohort_size`. So a cohort that this machine cannot train is tried with fewer clients. With
    `privacy.noise_by` "coordinator"; absent: `round.cohort_size`."""

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        if self.ray_address is not None and self.engine != "ray":
            raise ValueError(
                f'ray_address belongs to engine "ray", and engine is "{self.engine}"; set engine = "ray" or omit it'
            )
        return self


class SimulationFile(RunFile):
    """TOML file of a simulated run: the tables of a deployed run, and additional ones for its clients."""

    population: PopulationConfig = PopulationConfig()
    """Clients and their data."""

    devices: DeviceConfig = DeviceConfig()
    """Devices of the clients."""

    attack: AttackConfig = AttackConfig()
    """Attack of malicious clients, or of the coordinator."""

    dotted_names: ClassVar[Mapping[str, int]] = {**RunFile.dotted_names, "sites": 1}

    sites: dict[str, dict[str, Plain]] = Field(default={})
    """Settings of the task's sites by name, as the `[task]` table of each one's `agent.toml` has them:
    `sites.north.file = "north.csv"`."""

    simulation: SimulationConfig = SimulationConfig()
    """Computation of the clients' training on this machine."""
