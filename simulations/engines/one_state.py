"""The state of the one model that many clients share: each finds it as it was built."""

import logging

import torch

from atoll.training.model.as_built import AsBuilt

logger = logging.getLogger(__name__)

CHANGED_LATE = (
    "clients have changed it on the model, which the first client had not, so others may have started with it; from "
    "now on each starts with what task.model() made"
)


class OneState:
    """State of a model that clients share, which is restored before each client if the first one has changed it.

    Otherwise it is only compared once a round, so that a plain model costs nothing.

    Args:
        model: the newly built model, on its device.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._as_built = AsBuilt({"": model}, model.state_dict(keep_vars=True).values())
        self._changes: bool | None = None  # None: no client has finished

    def begin_round(self) -> None:
        """Check whether a later client has changed the state; if so, restore it before each client from now on."""
        if self._changes is False and (late := self._as_built.differences()):
            self._changes = True
            logger.warning("%s: %s", ", ".join(late), CHANGED_LATE)

    def begin(self) -> None:
        """Restore the shared model's state, if clients change it."""
        if self._changes:
            self._as_built.restore()

    def end(self) -> None:
        """Record whether the first client has changed the shared model's state."""
        if self._changes is None:
            self._changes = bool(self._as_built.differences())
