"""Trainings that every engine must support, and the results of a deployed client as the reference for their bits."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from atoll import Local, Task
from atoll.parallel.models.decoder import Decoder, DecoderConfig
from atoll.simulations.engines.benches import CountedDeadline
from atoll.simulations.engines.engine import Failed, Job, Trained, Training
from atoll.task.arrays import Arrays
from atoll.training.worker.bench import Outcome, Received
from atoll.training.worker.model_bench import ModelBench
from tests.parallel.models.cnn import CNN
from tests.parallel.models.mlp import MLP

SIZES = {"a": 17, "b": 40, "c": 5, "d": 24, "e": 1}
"""Examples of each client: with B = 8 short last batches, one batch alone, one example alone."""


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs.argmax(dim=-1) == targets).sum(), targets.numel()


def vectors(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator)
    return inputs, (inputs @ torch.randn(6, 3, generator=generator)).argmax(dim=1)


def images(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.randint(3, (count,), generator=generator)


def sentences(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(11, (count, 7), generator=generator)
    return words[:, :-1], words[:, 1:]


def token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def padded_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Leave out the token 0."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0)


def num_padded(targets: torch.Tensor) -> torch.Tensor:
    return (targets != 0).sum()


def num_padded_in_python(targets: torch.Tensor) -> int:
    """Count as `num_padded`, in a way that torch.func cannot map."""
    return sum(token != 0 for row in targets.tolist() for token in row)


WEIGHTS = torch.tensor([0.25, 2.5, 0.125])


def class_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, weight=WEIGHTS.to(outputs.device))


def class_weight(targets: torch.Tensor) -> torch.Tensor:
    return WEIGHTS.to(targets.device)[targets].sum()


def summed_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum") / 8


def mlp() -> nn.Module:
    return MLP([6, 8, 3])


def wide_chain() -> nn.Module:
    """A chain whose middle layer is stored as factors if a client takes at most 80 examples."""
    return nn.Sequential(nn.Linear(6, 160), nn.ReLU(), nn.Linear(160, 160), nn.ReLU(), nn.Linear(160, 3))


def broad() -> nn.Module:
    """A model whose activations are large enough for several threads."""
    return nn.Sequential(nn.Linear(6, 40_000), nn.ReLU(), nn.Linear(40_000, 3))


def frozen_mlp() -> nn.Module:
    model = mlp()
    model.layers[0].requires_grad_(False)
    return model


def frozen_decoder() -> nn.Module:
    """A decoder of which only the projections of the attention are trained."""
    model = decoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".attention." in name)
    return model


def cnn() -> nn.Module:
    return CNN([1, 4, 6], side=8, hidden=8, classes=3, norm=False)


def batchnorm_cnn() -> nn.Module:
    return CNN([1, 4, 6], side=8, hidden=8, classes=3)


def groupnorm_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.GroupNorm(3, 6),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def decoder() -> nn.Module:
    return Decoder(DecoderConfig(vocab=11, dim=8, layers=1, heads=2, sequence=8))


def dropout_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def noisy_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 3))


class Featured(nn.Module):
    """A model that returns its features beside the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        features = self.body(inputs)
        return self.head(features), features


class Recorded(Featured):
    """The same as a mapping, as the models of transformers have it; a place of it is empty."""

    def forward(self, inputs: torch.Tensor) -> Any:
        scores, features = super().forward(inputs)
        return OrderedDict(loss=None, scores=scores, features=[features])


def featured_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    scores, features = outputs
    return nn.functional.cross_entropy(scores, targets) + 0.1 * features.square().mean()


def recorded_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return featured_loss((outputs["scores"], *outputs["features"]), targets)


class ReadOneByOne(Dataset[Any]):
    """A data set without tensors, in which each reading draws from the seeded generator."""

    def __init__(self, tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.inputs, self.targets = tensors

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] + 0.01 * torch.randn(()), self.targets[index]


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module] = mlp
    local: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str = "fedavg"
    examples: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]] = vectors
    loss: Callable[[Any, Any], torch.Tensor] = nn.functional.cross_entropy
    steps: int | None = None
    units: Any = None
    travels: str = "all"
    metric: Callable[[Any, Any], Any] = accuracy

    def task(self) -> Task:
        return Task(
            model=self.model,
            data=lambda site, split: TensorDataset(*self.examples(SIZES.get(site, 7), SIZES.get(site, 7))),
            sites=list(SIZES),
            loss=self.loss,
            metrics={"accuracy": self.metric},
            local=Local(batch_size=8),
            units=self.units,
            travels=self.travels,
        )

    def training(self, **others: Any) -> Training:
        return Training(task=self.task(), overrides=self.local, algorithm=self.algorithm, model_seed=5, **others)


IMAGES: dict[str, Any] = {"examples": images, "local": {"lr": 0.05}}
WORDS: dict[str, Any] = {"model": decoder, "examples": sentences, "loss": token_loss}

PADDED: dict[str, Any] = {"model": decoder, "examples": sentences, "loss": padded_loss}

BATCHABLE = [
    Case("mlp"),
    Case("mlp two epochs", local={"epochs": 2}),
    Case("mlp one step of all", local={"batch_size": None}),
    Case("mlp in order", local={"shuffle": False}),
    Case("mlp momentum decay", local={"momentum": 0.9, "weight_decay": 0.01, "epochs": 2}),
    Case("mlp adam", local={"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1, "epochs": 2}),
    Case("mlp adamw", local={"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1}),
    Case("mlp decay of matrices", local={"momentum": 0.9, "weight_decay": 0.1, "decay_vectors": False}),
    Case(
        "mlp adamw, decay of matrices",
        local={"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "decay_vectors": False},
    ),
    Case("mlp fedprox", local={"prox_mu": 0.5, "epochs": 2}),
    Case("mlp clipped", local={"clip_norm": 0.1}),
    Case("mlp all at once", local={"clip_norm": 0.5, "prox_mu": 0.1, "momentum": 0.5, "weight_decay": 0.1}),
    Case("mlp fednova", local={"epochs": 2, "momentum": 0.5}, algorithm="fednova"),
    Case("mlp scaffold", local={"epochs": 2}, algorithm="scaffold"),
    Case("mlp stopped early", local={"epochs": 3}, steps=2),
    Case("mlp at most three steps", local={"epochs": 3, "max_steps": 3}),
    Case("mlp own head", local={"keep": "layers.1.*"}),
    Case("mlp own head scaffold", local={"keep": "layers.1.*"}, algorithm="scaffold"),
    Case("wide chain", model=wide_chain),
    Case("wide chain two epochs", model=wide_chain, local={"epochs": 2}),
    Case("wide chain three epochs", model=wide_chain, local={"epochs": 3}),
    Case("wide chain one step of all", model=wide_chain, local={"batch_size": None}),
    Case("wide chain stopped early", model=wide_chain, local={"epochs": 3}, steps=2),
    Case("wide chain fedprox", model=wide_chain, local={"prox_mu": 0.5}),
    Case("wide chain decay", model=wide_chain, local={"weight_decay": 0.1}),
    Case("wide chain scaffold", model=wide_chain, local={"epochs": 2}, algorithm="scaffold"),
    Case("wide chain own head", model=wide_chain, local={"keep": "4.*"}),
    Case("wide chain own middle", model=wide_chain, local={"keep": "2.*"}),
    Case("cnn", model=cnn, **IMAGES),
    Case("groupnorm cnn", model=groupnorm_cnn, **IMAGES),
    Case("groupnorm cnn scaffold", model=groupnorm_cnn, algorithm="scaffold", **IMAGES),
    Case("decoder", **WORDS),
    Case("decoder adamw", local={"optimizer": "adamw", "lr": 0.01}, **WORDS),
    Case("decoder padded", **PADDED, units=num_padded),
    Case("decoder padded two epochs", local={"epochs": 2}, **PADDED, units=num_padded),
    Case("decoder padded stopped early", steps=2, **PADDED, units=num_padded),
    Case("decoder padded counted in python", **PADDED, units=num_padded_in_python),
    Case("frozen mlp", model=frozen_mlp, travels="trained"),
    Case("frozen mlp scaffold", model=frozen_mlp, algorithm="scaffold", travels="trained"),
    Case("frozen decoder", **WORDS | {"model": frozen_decoder}, local={"prox_mu": 0.5}, travels="trained"),
    Case("mlp class weights", loss=class_loss, units=class_weight),
    Case("mlp sum", loss=summed_loss, units="sum"),
    Case("outputs in a tuple", model=Featured, loss=featured_loss, metric=lambda o, t: accuracy(o[0], t)),
    Case("outputs in a mapping", model=Recorded, loss=recorded_loss, metric=lambda o, t: accuracy(o["scores"], t)),
]


class Jittered(torch.optim.Optimizer):
    """Signs of gradients, with a rate that is drawn when it is made, and that a count beside `state` lowers."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr * (1 + torch.rand(()).item())})
        self.count, self.decay = 0, weight_decay

    def step(self, closure: Any = None) -> None:
        """Step without a decorator: the loop switches gradients off."""
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - self.decay).sub_(parameter.grad.sign(), alpha=group["lr"] / self.count)


OTHERS = [
    Case("own optimizer", local={"optimizer": Jittered, "lr": 0.01, "weight_decay": 0.1, "epochs": 2}),
    Case("own optimizer fedprox", local={"optimizer": Jittered, "lr": 0.01, "prox_mu": 0.5, "clip_norm": 0.1}),
    Case("batchnorm cnn", model=batchnorm_cnn, **IMAGES),
    Case("batchnorm cnn fedbn", model=batchnorm_cnn, examples=images, local={"keep": "batchnorm"}),
    Case("dropout", model=dropout_mlp, local={"epochs": 2}),
    Case("noisy", model=noisy_mlp, local={"epochs": 2}),
    Case("half", model=lambda: mlp().bfloat16(), examples=lambda n, s: (vectors(n, s)[0].bfloat16(), vectors(n, s)[1])),
]


def jobs_of(case: Case, number: int, own: Mapping[str, Arrays | None]) -> list[Job]:
    """Return the jobs of one round: all clients, each with another seed."""
    return [
        Job(site, seed=2**40 * number + index, steps=case.steps, own=own.get(site)) for index, site in enumerate(SIZES)
    ]


def deployed(training: Training, version: Arrays, job: Job) -> Outcome:
    """Return the outcome of a job at a deployed client."""
    assert isinstance(training.task, Task)
    request = {
        "site": job.client_id,
        "local": dict(training.overrides),
        "algorithm": training.algorithm,
        "seed": job.seed,
        "model_seed": training.model_seed,
    }
    return ModelBench(training.task, request).train(Received(version, job.own), request, CountedDeadline(job.steps))


def first_version(training: Training) -> Arrays:
    assert isinstance(training.task, Task)
    request = {"local": dict(training.overrides), "algorithm": training.algorithm}
    return ModelBench(training.task, request).initial(3)


def two_rounds(
    case: Case, train: Callable[[Arrays, Sequence[Job]], list[Trained]], training: Training
) -> Iterator[tuple[Trained, Outcome]]:
    """Yield the results of an engine and of a deployed client for the same jobs in two rounds.

    The second round begins with the deployed clients' results.
    """
    version, own = first_version(training), dict[str, Arrays | None]()
    for number in (1, 2):
        jobs = jobs_of(case, number, own)
        outcomes = [deployed(training, version, job) for job in jobs]
        yield from zip(train(version, jobs), outcomes, strict=True)
        own = {job.client_id: outcome.own for job, outcome in zip(jobs, outcomes, strict=True)}
        for outcome in outcomes:
            for name, change in outcome.trained.update.items():
                version[name] = np.asarray(version[name] + change / len(jobs), version[name].dtype)


def all_trained(results: Iterator[Trained | Failed]) -> list[Trained]:
    """Return copies of the results, because their arrays may be in memory that is reused."""
    return [copied(result) for result in results if isinstance(result, Trained)]


def copied(result: Trained) -> Trained:
    return replace(
        result,
        update={name: array.copy() for name, array in result.update.items()},
        own={name: array.copy() for name, array in result.own.items()},
        row=None if result.row is None else result.row.copy(),
    )


def assert_same_bits(found: Trained, expected: Outcome) -> None:
    for ours, theirs in ((found.update, expected.trained.update), (found.own, expected.own)):
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            assert ours[name].dtype == array.dtype
            np.testing.assert_array_equal(ours[name], array, err_msg=name)
    assert found.statistics == expected.trained.statistics
    assert list(found.statistics) == list(expected.trained.statistics)
    assert (found.num_examples, found.work) == (expected.trained.num_examples, expected.trained.work)
    assert found.report == expected.report


def subset_task(task: Task) -> Task:
    """Return the same clients, as subsets of subsets of one data set."""
    everything = TensorDataset(*vectors(200, 1))
    half = Subset(everything, list(range(199, 0, -2)))
    starts = dict(zip(SIZES, np.cumsum([0, *SIZES.values()]), strict=False))
    return replace(
        task, data=lambda site, split: Subset(half, [int(starts[site]) + i for i in reversed(range(SIZES[site]))])
    )


def one_by_one_task(task: Task) -> Task:
    return replace(task, data=lambda site, split: ReadOneByOne(vectors(SIZES[site], 2)))


def vectors_of(site: str, split: str) -> TensorDataset:
    return TensorDataset(*vectors(SIZES[site], SIZES[site]))


def picklable() -> Task:
    """Return the task of `Case("mlp")`, of functions that another process finds by their names."""
    return replace(Case("mlp").task(), data=vectors_of)
