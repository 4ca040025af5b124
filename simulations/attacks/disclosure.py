"""Inference by a coordinator from what it received of single clients: an input, or membership in its data.

    inversion     mean squared distance of the best image that the first layer gives (`inversion.py`) to the client's
                  input closest to it, beside that of the mean of other clients' inputs, which needs no update
    membership    area under the ROC curve of a score (`membership.py`) that tells the client's examples from others'

With plain updates it reads these; in a session of a run with `[secure]` it reads the masked words as numbers.
"""

import hashlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from atoll.protocol.settings import ConfigError
from atoll.simulations.attacks.config import Inference
from atoll.simulations.attacks.inversion import Values, distance, inverted
from atoll.simulations.attacks.membership import auc, scores
from atoll.task.arrays import Arrays
from atoll.task.randomness import data_of
from atoll.task.task import Task
from atoll.tensors.layout import Layout
from atoll.training.data.batches import fetcher, to_device
from atoll.training.model.parameters import build_model, load_parameters, trained_by_name
from atoll.training.trials.contract import one_loss

INPUTS_MAX = 64
"""Inputs of a client to which images are compared."""
MEMBERS_MAX = 16
"""Examples of a client, and of others, that are told apart."""
OTHERS_MAX = 16
"""Other clients whose examples the coordinator knows, as it would know public data."""

Inferred = dict[str, float]
"""The result for a round: the number of `clients`, and the median or mean over them of each measure."""


class _Examples(NamedTuple):
    """Some examples of one client."""

    inputs: torch.Tensor
    targets: Any

    @property
    def rows(self) -> Values:
        return self.inputs.reshape(len(self.inputs), -1).numpy().astype(np.float64)


class FirstLayer(NamedTuple):
    """The linear layer over a model's inputs."""

    weight: str
    """Name of the tensor (units, inputs)."""
    bias: str
    inputs: int


@dataclass(frozen=True)
class Disclosure:
    """Inference from single clients' updates.

    Args:
        kind: of the attack.
        task: of the run; its sites are the clients.
        clients: of the run.
        seed: of the run, which draws the examples and the other clients.
    """

    kind: Inference
    task: Task
    clients: Sequence[str]
    seed: int

    @cached_property
    def layer(self) -> FirstLayer | None:
        """The layer that an inversion reads; None: the model has none, or the attack reads all tensors."""
        return first_layer(build_model(self.task, 0)) if self.kind == "inversion" else None

    def faults(self) -> Iterator[str]:
        """Yield why the task is not one that the attack can measure."""
        got = f"attack.kind: got {self.kind!r}"
        if len(self.clients) < 2:
            yield f"{got}, which compares with other clients' examples; allowed: a run of 2 clients or more"
        some = self.examples_of(self.clients[0], 1)
        if some is None:
            yield f"{got}, which needs inputs that are one tensor of numbers, an example a row"
        elif self.kind == "inversion":
            layer, size = self.layer, some.rows.shape[1]
            if layer is None:
                yield f"{got}, which needs a model whose first layer with weights is torch.nn.Linear with a bias"
            elif layer.inputs != size:
                yield f"{got}, which needs a first layer over the whole input: it has {layer.inputs} of {size} inputs"

    def check_travels(self, layout: Layout) -> None:
        """Check that the tensors that the attack reads travel; raise ConfigError if not.

        Args:
            layout: of the model's versions.
        """
        layer = self.layer
        lacking = {layer.weight, layer.bias} - {tensor.name for tensor in layout} if layer else set()
        if lacking:
            what = f"attack.kind: got 'inversion', and {', '.join(sorted(lacking))} stays at the clients"
            raise ConfigError([f"{what}; allowed: a run whose clients send the first layer"])

    def of_round(self, version: Arrays, seen: Mapping[str, Arrays]) -> Inferred:
        """Return what was inferred in a round.

        Args:
            version: the global model that the clients trained from.
            seen: what the coordinator received of each client: updates, or masked words as numbers. Each is read once.
        """
        of_clients = _Inversions(self) if self.kind == "inversion" else _Memberships(self, version)
        found = [of_clients.of(client, seen[client]) for client in sorted(seen)]
        columns = {name: [each[name] for each in found if each] for name in of_clients.MEASURES}
        average = statistics.median if self.kind == "inversion" else statistics.mean
        measured = len(next(iter(columns.values())))
        return {"clients": measured} | {name: float(average(each)) for name, each in columns.items() if each}

    def others(self, client: str) -> list[_Examples]:
        """Return examples of some other clients, which do not depend on the round."""
        names = [name for name in self.clients if name != client]
        drawn = self._rng("others", client).permutation(len(names))[:OTHERS_MAX]
        found = (self.examples_of(names[number], INPUTS_MAX // 4) for number in sorted(drawn))
        return [each for each in found if each is not None]

    def examples_of(self, client: str, most: int) -> _Examples | None:
        """Return at most `most` of a client's examples; None: it has none that are rows of numbers."""
        data = data_of(self.task, client, "train")
        if data is None or not len(data):
            return None
        chosen = np.sort(self._rng("examples", client).permutation(len(data))[:most])
        inputs, targets = to_device(fetcher(data)(torch.from_numpy(chosen)), torch.device("cpu"))
        is_rows = isinstance(inputs, torch.Tensor) and inputs.is_floating_point() and inputs.ndim > 1
        return _Examples(inputs, targets) if is_rows else None

    def _rng(self, *purpose: object) -> np.random.Generator:
        name = " ".join(map(str, ("atoll disclosure", self.seed, *purpose)))
        return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16]))


def first_layer(model: torch.nn.Module) -> FirstLayer | None:
    """Return the first layer with parameters, if it is linear and has a bias."""
    for name, module in model.named_modules():
        if any(parameter is not None for parameter in module.parameters(recurse=False)):
            if not isinstance(module, torch.nn.Linear) or module.bias is None:
                return None
            before = f"{name}." if name else ""
            return FirstLayer(f"{before}weight", f"{before}bias", module.in_features)
    return None


class _Inversions:
    """Images from the updates of a round."""

    MEASURES = ("distance", "mean_image")

    def __init__(self, attack: Disclosure) -> None:
        assert attack.layer is not None
        self._attack, self._layer = attack, attack.layer

    def of(self, client: str, seen: Arrays) -> Inferred:
        mine, others = self._attack.examples_of(client, INPUTS_MAX), self._attack.others(client)
        if mine is None or not others:
            return {}
        rows = np.concatenate([each.rows for each in others])
        weight, bias = (seen[name].astype(np.float64) for name in (self._layer.weight, self._layer.bias))
        guesses = inverted(weight, bias, float(rows.min()), float(rows.max()))
        mean = rows.mean(axis=0, keepdims=True)
        return {"distance": distance(guesses, mine.rows), "mean_image": distance(mean, mine.rows)}


class _Memberships:
    """Members told from the updates of a round."""

    MEASURES = ("area",)

    def __init__(self, attack: Disclosure, version: Arrays) -> None:
        self._attack = attack
        self._model = build_model(attack.task, 0).eval()
        load_parameters(self._model, version)

    def of(self, client: str, seen: Arrays) -> Inferred:
        mine, others = self._attack.examples_of(client, MEMBERS_MAX), self._attack.others(client)
        if mine is None or not others:
            return {}
        named = sorted(trained_by_name(self._model).keys() & seen.keys())
        return {"area": auc(self._scores(seen, named, [mine]), self._scores(seen, named, others))}

    def _scores(self, seen: Arrays, names: list[str], each: Sequence[_Examples]) -> Values:
        """Return the scores of at most `MEMBERS_MAX` examples, taken from each client in turn."""
        task, most = self._attack.task, range(MEMBERS_MAX)
        places = [(of, row) for row in most for of in range(len(each)) if row < len(each[of].inputs)]
        found = []
        for of, row in places[:MEMBERS_MAX]:
            inputs, targets = each[of].inputs[row : row + 1], each[of].targets[row : row + 1]
            found.append(flat(gradient(task, self._model, inputs, targets), names))
        return scores(flat(seen, names), np.stack(found))


def gradient(task: Task, model: torch.nn.Module, inputs: Any, targets: Any) -> Arrays:
    """Return the gradient of a batch's loss, by the name of the tensor."""
    named = trained_by_name(model)
    loss = one_loss(task.loss(model(inputs), targets))
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    return {name: value.numpy() for name, value in zip(named, found, strict=True)}


def flat(tensors: Mapping[str, Any], names: Iterable[str]) -> Values:
    """Return all values of some tensors side by side."""
    return np.concatenate([np.asarray(tensors[name], np.float64).reshape(-1) for name in names])
