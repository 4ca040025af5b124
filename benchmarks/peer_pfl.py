"""The side of pfl-research in `simulation`, run by the Python of .venv-peers: its simulated backend with its FedAvg.

.venv-peers/bin/python -m benchmarks.peer_pfl SETTING THREADS
.venv-peers/bin/torchrun --nproc-per-node 2 -m benchmarks.peer_pfl SETTING THREADS
"""

import os
import sys
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn

from benchmarks.learners import BATCH_SIZE, LR, RoundRequests, accuracy, clients_of, model_of, say
from benchmarks.tight_loops import SETTINGS

NEVER = 10**9


class Learner(nn.Module):
    """A model with the interface that pfl expects."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inside = model_of(name)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, eval: bool = False) -> torch.Tensor:
        """Return the loss of one batch."""
        return nn.functional.cross_entropy(self.inside(inputs), targets)

    def metrics(self, inputs: torch.Tensor, targets: torch.Tensor, eval: bool = True) -> dict[str, Any]:
        """Return no metrics."""
        return {}


class Word(TrainingProcessCallback):  # type: ignore[misc]
    """A callback that runs rounds on demand; with several ranks, the first one forwards the commands."""

    def __init__(self) -> None:
        self._ranks, self._is_first = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0)) == 0
        self._requests = RoundRequests()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Return whether to stop, by the next command."""
        goes_on = torch.ones(1)
        if self._is_first:
            goes_on[0] = self._requests.another()
        if self._ranks > 1:
            torch.distributed.broadcast(goes_on, 0)
        return not goes_on, Metrics()


def main() -> None:
    name, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    np.random.seed(1)
    clients, cohort = clients_of(name), SETTINGS[name][4]
    learner = Learner(name)
    model = PyTorchModel(learner, torch.optim.SGD, torch.optim.SGD(learner.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=NEVER, evaluation_frequency=NEVER, train_cohort_size=cohort, val_cohort_size=0
        ),
        SimulatedBackend(
            training_data=FederatedDataset(
                lambda user: PyTorchTensorDataset(clients[user], user_id=str(user)),
                get_user_sampler("minimize_reuse", list(range(len(clients)))),
            ),
            val_data=None,
        ),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH_SIZE),
        callbacks=[Word()],
        send_metrics_to_platform=False,
    )
    if int(os.environ.get("RANK", 0)) == 0:
        say(accuracy=accuracy(name, [parameter.detach() for parameter in learner.parameters()]))


if __name__ == "__main__":
    main()
