"""The stores in an agent's state directory that its jobs and uploads share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from atoll.client.disk.client_state import PersonalState
from atoll.client.disk.fresh_bytes import FreshBytes
from atoll.client.disk.model_cache import ModelCache
from atoll.client.disk.residual_store import ResidualStore
from atoll.client.disk.spool import Spool
from atoll.client.disk.state_directory import StateDirectory


@dataclass(frozen=True, slots=True)
class Stores:
    """Open stores of one state directory; `open` makes them."""

    spool: Spool
    encoded: Spool
    """Encoded updates of secure sums, in the same form; none is ever sent."""
    models: ModelCache
    residuals: ResidualStore
    client_state: PersonalState
    work: Path
    """Folder that the worker writes into; the stores take over its files."""
    noise_secret: bytes = field(repr=False)
    """Secret of the noise that this site draws."""
    fresh: FreshBytes
    """Fresh bytes of the noise of each training, until its update leaves."""

    @classmethod
    def open(cls, state: StateDirectory, *, spool_max_bytes: int) -> Self:
        """Open the stores of a locked state directory.

        Args:
            state: the directory.
            spool_max_bytes: disk space that the spool may use.
        """
        spool = Spool(state.spool, spool_max_bytes)
        residuals = ResidualStore(state.residuals, spool.entries().values())
        return cls(
            spool,
            Spool(state.encoded, spool_max_bytes),
            ModelCache(state.models),
            residuals,
            PersonalState(state.client_state),
            state.work,
            state.noise_secret,
            FreshBytes(state.path),
        )
