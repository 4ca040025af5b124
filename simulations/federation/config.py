"""The settings of a simulated run: those of a deployed one, and who its clients are."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from atoll.protocol.settings import STRICT
from atoll.server.config.run import RunFile
from atoll.simulations.attacks.config import AttackConfig
from atoll.simulations.devices.config import DeviceConfig
from atoll.simulations.populations.config import PopulationConfig

EngineName = Literal["auto", "sequential", "processes", "batched", "ray"]


class SimulationConfig(BaseModel):
    """How the clients are trained on this machine. Nothing of it changes what is decided; engines round differently."""

    model_config = STRICT

    engine: EngineName = "auto"
    """"sequential": one client after the other, in this process, with the bits of a deployed client. "processes": the
    same in several processes. "batched": many clients in one product. "ray": on more machines than one. "auto":
    whichever of the first three is fastest in a short measurement."""

    workers: Annotated[int, Field(ge=0, le=4096)] = 0
    """Processes that train; 0: as many as there are cores."""

    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Of each process; those of Ray have one. With more than one the bits may change from run to run, and each of
    several processes unpickles the task, which one of lambdas cannot be."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the models compute."""

    ray_address: str | None = None
    """Of "ray": the cluster to use; absent: a local one is started."""

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        if self.ray_address is not None and self.engine != "ray":
            raise ValueError(
                f'ray_address is of the engine "ray", and engine is "{self.engine}": name it, or leave one out'
            )
        return self


class SimulationFile(RunFile):
    """What a simulated run's TOML may hold: that of a deployed run, and beside it the clients."""

    population: PopulationConfig = PopulationConfig()
    """Who holds what."""

    devices: DeviceConfig = DeviceConfig()
    """What the clients run on."""

    attack: AttackConfig = AttackConfig()
    """What some of the clients do to the others."""

    simulation: SimulationConfig = SimulationConfig()
    """How the clients are trained on this machine."""
