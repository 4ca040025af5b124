"""A model that starts from a file of another library or of Atoll: names, ties, shapes, dtypes, and what is left."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file, save_model

from atoll.training.model.parameters import aliases_of, parameters_of
from atoll.training.worker.warm_start import LENIENT, Start, StartRefused, matched, read, start_model


class Tied(torch.nn.Module):
    """An embedding and a head that share their weights, and a layer norm."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, width)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))


def built(seed: int, width: int = 4) -> Tied:
    torch.manual_seed(seed)
    model = Tied(width)
    model.steps += seed
    return model


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_file_of_hugging_face_s_library_is_a_start_whichever_name_it_keeps(tmp_path: Path) -> None:
    other = built(1)
    save_model(other, str(tmp_path / "saved"))  # of tied tensors it keeps one name
    for kept in ("embed.weight", "head.weight"):
        tensors = {name: tensor for name, tensor in other.state_dict().items() if name.partition(".")[0] in ("norm",)}
        tensors |= {kept: other.embed.weight, "steps": other.steps, "seen": other.seen}
        save_file(tensors, tmp_path / kept)
    for name in ("saved", "embed.weight", "head.weight"):
        model = built(2)
        assert start_model(model, Start(tmp_path / name)) == ""
        assert equal(model, other)
        assert model.head.weight is model.embed.weight


def test_names_of_one_tensor_that_differ_are_refused(tmp_path: Path) -> None:
    other = built(1).state_dict()
    save_file(
        {name: tensor.clone() for name, tensor in other.items()} | {"head.weight": torch.ones(6, 4)}, tmp_path / "f"
    )
    with pytest.raises(StartRefused, match=r"embed.weight and head.weight are one tensor of the model, and differ in"):
        start_model(built(2), Start(tmp_path / "f"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_are_read_as_torch_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    other = built(1).to(dtype)
    save_model(other, str(tmp_path / "f"))
    model = built(2)
    start_model(model, Start(tmp_path / "f"))
    assert equal(model, other.to(torch.float32))
    assert model.steps.item() == 1


def test_a_model_of_bfloat16_starts_from_float32(tmp_path: Path) -> None:
    other = built(1)
    save_model(other, str(tmp_path / "f"))
    model = built(2).to(torch.bfloat16)
    start_model(model, Start(tmp_path / "f"))
    assert equal(model, other.to(torch.bfloat16))


def test_every_difference_is_listed_and_the_model_is_unchanged(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(5), "norm.bias": torch.ones(4), "more": torch.ones(1)}, tmp_path / "f")
    model = built(2)
    with pytest.raises(StartRefused) as refused:
        start_model(model, Start(tmp_path / "f"))
    assert str(refused.value).split("; ") == [
        "norm.weight is float32 (5,), and the model has float32 (4,)",
        f"{tmp_path}/f lacks steps, seen, embed.weight",
        f"{tmp_path}/f has, and the model lacks, more ({LENIENT})",
    ]
    assert equal(model, built(2))


def test_without_strict_what_does_not_fit_is_left_and_listed(tmp_path: Path) -> None:
    other = built(1, width=4).state_dict()
    save_file(
        {"norm.weight": torch.full((4,), 7.0), "head.weight": torch.ones(9, 4), "more": torch.ones(1)}, tmp_path / "f"
    )
    model = built(2)
    note = start_model(model, Start(tmp_path / "f", is_strict=False))
    assert note == ("the initial values stay in steps, seen, embed.weight, norm.bias; not used: head.weight, more")
    assert model.norm.weight.tolist() == [7.0] * 4
    assert torch.equal(model.embed.weight, built(2).embed.weight)
    assert other.keys() == model.state_dict().keys()


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        (
            {"other": torch.ones(2)},
            "no tensor of .* is one of the model, which has steps, seen.*, and the file other: name another",
        ),
        ({}, "no tensor of .* is one of the model, which has steps, seen.*, and the file none: name another"),
        ({"norm.bias": torch.tensor([1.0, 2.0, float("nan"), 0.0])}, "norm.bias has NaN, infinite values or values"),
        ({"norm.bias": torch.full((4,), 1e300, dtype=torch.float64)}, "norm.bias has NaN, infinite values or values"),
    ],
)
def test_some_files_are_no_start_at_all(
    tmp_path: Path, tensors: dict[str, torch.Tensor], fault: str, is_strict: bool
) -> None:
    save_file(tensors, tmp_path / "f")
    with pytest.raises(StartRefused, match=fault):
        start_model(built(2), Start(tmp_path / "f", is_strict))


def test_a_float_is_no_start_of_an_integer(tmp_path: Path) -> None:
    own = {"steps": np.array(3), "weight": np.zeros(2, np.float32)}
    given = {"steps": np.array(3.0, np.float32), "weight": np.ones(2, np.float32)}
    with pytest.raises(StartRefused, match="steps is float32, and the model has int64"):
        matched(own, {}, given, is_strict=True, where="f")


def test_what_is_no_safetensors_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"PK\x03\x04 a file of torch.save")
    with pytest.raises(StartRefused, match=r"f is not a safetensors file .*: save .* with safetensors.torch.save_file"):
        read(tmp_path / "f")
    with pytest.raises(StartRefused, match=r"there is no file .*/missing"):
        read(tmp_path / "missing")
    with pytest.raises(StartRefused, match="is a directory: name a file"):
        read(tmp_path)


def test_control_variates_are_no_part_of_a_start(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2), "control/weight": torch.ones(2)}, tmp_path / "f")
    assert read(tmp_path / "f").keys() == {"weight"}
    own = {"weight": np.zeros(2, np.float32), "control/weight": np.zeros(2, np.float32)}
    found = matched(own, {}, read(tmp_path / "f"), is_strict=True, where="f").arrays
    assert found["weight"].tolist() == [1.0, 1.0]
    assert found["control/weight"].tolist() == [0.0, 0.0]


@given(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef")))
def test_strict_is_all_or_nothing(own: set[str], given_names: set[str]) -> None:
    zeros = {name: np.zeros(1, np.float32) for name in sorted(own)}
    ones = {name: np.ones(1, np.float32) for name in sorted(given_names)}
    if not own & given_names:
        return
    found = matched(zeros, {}, ones, is_strict=False, where="f")
    assert {name for name, array in found.arrays.items() if array[0]} == own & given_names
    assert (set(found.own), set(found.unused)) == (own - given_names, given_names - own)
    if own == given_names:
        assert matched(zeros, {}, ones, is_strict=True, where="f") == found
    else:
        with pytest.raises(StartRefused):
            matched(zeros, {}, ones, is_strict=True, where="f")


def test_a_tied_tensor_has_all_its_names() -> None:
    model = built(1)
    assert aliases_of(model) == {"embed.weight": ["embed.weight", "head.weight"]}
    assert "head.weight" not in parameters_of(model)
