"""SCAFFOLD at the client, with option II: control variates correct the drift of the local steps.

Legend: x the global and y the local model, K steps really taken, rate η, c the server's and c_i this client's variate.

    y <- y - η (g_i(y) - c_i + c)                    K times; `corrections` are c - c_i
    c_i+ = c_i - c + (x - y) / (K η)                 so it is the mean of the K gradients
    sent: c_i+ - c_i = -c - u / (K η)                u = y - x, this client's update

c and c_i begin at zero. c is sent with each version as `control/<parameter>`, c_i stays here. Option II holds only
while a step is exactly η times its gradient: `algorithms` refuses momentum, decay, clipping and a proximal term.

Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm 1.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from atoll.task.arrays import Arrays, check_finite
from atoll.tensors.layout import BESIDE, CONTROL, OPTIMIZER, STATE


class ControlVariates:
    """The variates c and c_i of one client in one round, by the name of the parameter; float32.

    Args:
        server: c.
        client: c_i, of the same names and shapes; None: zeros.
    """

    def __init__(self, server: Arrays, client: Arrays | None) -> None:
        self._server = server
        self._client = client or {name: np.zeros_like(c) for name, c in server.items()}

    @property
    def corrections(self) -> Arrays:
        """The summands c - c_i of the gradients."""
        return {name: c - self._client[name] for name, c in self._server.items()}

    def after(self, update: Mapping[str, np.ndarray[Any, Any]], *, num_steps: int, lr: float) -> tuple[Arrays, Arrays]:
        """Return c_i+ - c_i, which is sent, and c_i+, which is stored; both under `control/<parameter>`.

        Args:
            update: y - x.
            num_steps: K >= 1.
            lr: η.

        Raises:
            NotFinite: a value leaves float32.
        """
        sent: Arrays = {}
        stored: Arrays = {}
        with np.errstate(over="ignore"):
            for name, c in self._server.items():
                exact = -c.astype(np.float64) - update[name].astype(np.float64) / (num_steps * lr)
                sent[CONTROL + name] = exact.astype(np.float32)
                stored[CONTROL + name] = self._client[name] + sent[CONTROL + name]
        check_finite(stored, "control variate")
        return sent, stored


def split(arrays: Mapping[str, np.ndarray[Any, Any]]) -> tuple[Arrays, Arrays]:
    """Split the tensors of a version, or of a client, into the model's and the control variates by parameter."""
    model = {name: array for name, array in arrays.items() if not name.startswith((*BESIDE, STATE, OPTIMIZER))}
    return model, {name.removeprefix(CONTROL): arrays[name] for name in arrays if name.startswith(CONTROL)}
