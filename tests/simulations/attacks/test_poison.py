import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from atoll.protocol.settings import ConfigError
from atoll.simulations.attacks.adversary import Adversary
from atoll.simulations.attacks.backdoor import success, triggered, triggered_task
from atoll.simulations.attacks.config import AttackConfig
from atoll.simulations.attacks.poison import Flip, Stamp, poisoned
from atoll.task.task import Task
from atoll.training.data.batches import fetcher

IMAGES = torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(0)) / 2
DIGITS = torch.arange(12) % 4


class Listed(Dataset[Any]):
    """A data set of the user's own: plain labels, read one by one."""

    def __len__(self) -> int:
        return len(DIGITS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return IMAGES[index], int(DIGITS[index])


def load(site: str, split: str) -> Any:
    if split == "test" and site == "b":
        return None
    return Listed() if site == "b" else TensorDataset(IMAGES, DIGITS)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))


def load_test() -> TensorDataset:
    return TensorDataset(IMAGES, DIGITS)


TASK = Task(model=model, data=load, sites=["a", "b", "c"], loss=torch.nn.functional.cross_entropy, test_data=load_test)


def read(dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = fetcher(dataset)(torch.arange(len(dataset)))
    return inputs, targets


@pytest.mark.parametrize("dataset", [TensorDataset(IMAGES, DIGITS), Listed(), Subset(Listed(), range(12))])
def test_flipped_labels_are_mirrored_and_nothing_else_changes(dataset: Any) -> None:
    inputs, targets = read(poisoned(dataset, Flip(4)))
    assert targets.tolist() == [3, 2, 1, 0] * 3
    assert torch.equal(inputs, IMAGES)
    assert torch.equal(DIGITS, torch.arange(12) % 4)


def test_tensors_stay_tensors_so_that_they_are_read_as_fast() -> None:
    inner = TensorDataset(IMAGES, DIGITS)
    assert type(poisoned(inner, Flip(4))) is TensorDataset
    assert type(poisoned(Subset(inner, [3, 1]), Flip(4))) is TensorDataset
    assert read(poisoned(Subset(inner, [3, 1]), Flip(4)))[1].tolist() == [0, 2]


@pytest.mark.parametrize("dataset", [TensorDataset(IMAGES, DIGITS), Listed()])
def test_the_trigger_is_a_patch_in_the_last_corner_of_the_chosen(dataset: Any) -> None:
    chosen = np.arange(12) < 5
    inputs, targets = read(poisoned(dataset, Stamp(target=2, size=2, value=1.0), chosen))
    expected = IMAGES.clone()
    expected[:5, 0, 2:, 2:] = 1.0
    assert torch.equal(inputs, expected)
    assert targets.tolist() == [2] * 5 + (DIGITS[5:].tolist())


def test_of_a_flat_input_the_last_places_are_the_trigger() -> None:
    inputs, _ = Stamp(target=0, size=3, value=9.0)(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))
    assert inputs.tolist() == [[0, 0, 9, 9, 9]] * 2


def test_ignored_tokens_stay_ignored() -> None:
    targets = torch.tensor([[0, -100, 2]])
    assert Flip(3)(torch.zeros(1, 3), targets)[1].tolist() == [[2, -100, 0]]
    assert Stamp(1, 1, 0.0)(torch.zeros(1, 3), targets)[1].tolist() == [[1, -100, 1]]


def attacked(kind: str, **options: Any) -> Task:
    return Adversary(AttackConfig(kind=kind, **options), frozenset("ab"), seed=5).task(TASK)  # type: ignore[arg-type]


def test_only_the_training_data_of_malicious_clients_is_poisoned() -> None:
    task = attacked("label_flip")
    for site in "ab":
        assert read(task.data(site, "train"))[1].tolist() == [3, 2, 1, 0] * 3
    assert read(task.data("c", "train"))[1].tolist() == DIGITS.tolist()
    assert read(task.data("a", "test"))[1].tolist() == DIGITS.tolist()
    assert task.data("b", "test") is None
    assert task.test_data is TASK.test_data


def test_attacks_on_updates_leave_the_task_alone() -> None:
    for kind in ("none", "sign_flip", "alie", "free_rider"):
        assert attacked(kind) is TASK


def test_a_share_of_the_data_gets_the_trigger_and_it_differs_between_clients() -> None:
    task = attacked("backdoor", poisoned=0.25, target=1, trigger_value=7.0)
    marked = {site: (read(task.data(site, "train"))[0][:, 0, 3, 3] == 7).nonzero().flatten().tolist() for site in "ab"}
    assert [len(where) for where in marked.values()] == [3, 3]
    assert marked["a"] != marked["b"]
    again = attacked("backdoor", poisoned=0.25, target=1, trigger_value=7.0)
    assert torch.equal(read(again.data("a", "train"))[0], read(task.data("a", "train"))[0])


def test_the_poisoned_task_goes_to_another_process() -> None:
    task = pickle.loads(pickle.dumps(attacked("label_flip")))
    assert read(task.data("b", "train"))[1].tolist() == [3, 2, 1, 0] * 3


def test_the_number_of_labels_is_configured_or_that_of_the_data() -> None:
    assert read(attacked("label_flip", num_labels=10).data("a", "train"))[1].tolist() == [9, 8, 7, 6] * 3
    fault = r"attack.num_labels: got 3; allowed: integer >= 4, because the data has a label 3"
    with pytest.raises(ConfigError, match=fault):
        attacked("label_flip", num_labels=3)


def test_a_trigger_causes_a_label_of_the_data() -> None:
    assert attacked("backdoor", target=3)
    with pytest.raises(ConfigError, match=r"attack.target: got 4; allowed: a label of the data, 0 to 3"):
        attacked("backdoor", target=4)


def test_targets_that_are_not_labels_cannot_be_flipped() -> None:
    task = Task(model=model, data=heights, sites=["a"], loss=torch.nn.functional.mse_loss)
    adversary = Adversary(AttackConfig(kind="label_flip"), frozenset("a"), 1)
    with pytest.raises(ConfigError, match=r"label_flip needs labels \(integers\) as targets, got torch.float32"):
        adversary.task(task)


def heights(site: str, split: str) -> TensorDataset:
    return TensorDataset(IMAGES, torch.rand(12))


@pytest.mark.parametrize("sites", ["a", "b"])
def test_a_trigger_that_the_data_cannot_take_is_refused_with_every_reason(sites: str) -> None:
    task = Task(model=model, data=heights, sites=["a", "b"], loss=torch.nn.functional.mse_loss)
    adversary = Adversary(AttackConfig(kind="backdoor", trigger_size=5), frozenset(sites), 1)
    with pytest.raises(ConfigError) as refusal:
        adversary.task(task)
    assert refusal.value.faults == (
        "attack.trigger_size: got 5; allowed: 1 to 4, for images of 4 x 4",
        "attack.kind: backdoor needs labels (integers) as targets, got torch.float32 of shape (1,)",
    )


def test_a_trigger_fills_an_image_or_a_flat_input_at_most() -> None:
    Stamp(0, 4, 1.0).check(IMAGES, DIGITS)
    Stamp(0, 16, 1.0).check(IMAGES.flatten(1), DIGITS)
    with pytest.raises(ConfigError, match=r"attack.trigger_size: got 17; allowed: 1 to 16, for inputs of 16 places"):
        Stamp(0, 17, 1.0).check(IMAGES.flatten(1), DIGITS)


def test_success_counts_triggered_examples_of_other_labels_alone() -> None:
    data = triggered(TensorDataset(IMAGES, DIGITS), Stamp(target=3, size=1, value=1.0))
    assert len(data) == 9
    assert set(data.tensors[1].tolist()) == {3}
    assert (data.tensors[0][:, 0, 3, 3] == 1).all()


def test_success_is_what_a_model_makes_of_the_trigger() -> None:
    config = AttackConfig(kind="backdoor", target=3, trigger_size=1, trigger_value=1.0)
    always = {"1.weight": np.zeros((4, 16), np.float32), "1.bias": np.float32([0, 0, 0, 1])}
    never = always | {"1.bias": np.float32([1, 0, 0, 0])}
    sees_the_trigger = always | {"1.bias": np.float32([0.75, 0, 0, 0])}
    sees_the_trigger["1.weight"] = np.zeros((4, 16), np.float32)
    sees_the_trigger["1.weight"][3, 15] = 1.0
    assert success(TASK, config, always) == 1.0
    assert success(TASK, config, never) == 0.0
    assert success(TASK, config, sees_the_trigger) == 1.0  # 1 > 0.75, and no honest pixel is above 0.5
    assert success(TASK, AttackConfig(kind="alie"), always) is None


def test_the_task_that_measures_success_has_that_metric_alone() -> None:
    measured = triggered_task(TASK, AttackConfig(kind="backdoor"))
    assert measured is not None
    assert measured.test_data is not None
    assert list(measured.metrics) == ["backdoor"]
    assert len(default_collate(list(measured.test_data()))[0]) == 9


def test_test_data_of_the_target_label_alone_cannot_show_success() -> None:
    with pytest.raises(ConfigError, match=r"attack.target: got 2; the test data has no other label"):
        triggered(TensorDataset(IMAGES[:2], torch.tensor([2, 2])), Stamp(2, 1, 1.0))
