"""Shares, loading and writing under every layout of a mesh, against the tensors of the whole model."""

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blank import blank, give_memory
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.ties import tied_names
from atoll.parallel.exchange.load import load_shares
from atoll.parallel.exchange.shares import Share, owned, shares_of
from atoll.parallel.exchange.write import write_part
from atoll.task.errors import NotFinite, TaskMismatch
from atoll.tensors import safetensors_file
from atoll.tensors.layout import pieces_in_order
from atoll.training.model.parameters import parameters_of
from tests.parallel.exchange.layouts import LAYOUTS, plain
from tests.parallel.ranks import call_on_ranks
from tests.turns import in_turn

Arrays = dict[str, np.ndarray[Any, Any]]


def version(number: int, like: Arrays) -> Arrays:
    rng = np.random.default_rng(number)
    return {
        name: rng.standard_normal(array.shape).astype(np.float32)
        if array.dtype == np.float32
        else rng.integers(0, 100, array.shape).astype(array.dtype)
        for name, array in sorted(like.items())
    }


def differs(shares: list[Share], expected: Arrays) -> list[str]:
    return [s.name for s in shares if not np.array_equal(s.local.numpy(), expected[s.name][s.slices])]


def on_a_rank(name: str, folder: str) -> tuple[list[Any], list[str]]:
    """The owned boxes with their updates, and whatever is wrong."""
    make, degrees, options = LAYOUTS[name]
    reference = make()
    names, tied = parameters_of(reference), tied_names(reference)
    plan = Plan(mesh=Mesh(**degrees), **options)
    axes = Axes(plan.mesh, "cpu") if plan.mesh.size > 1 else None
    faults = []
    for is_blank in (False, True):
        model = blank(make) if is_blank else make()
        loss = torch.nn.functional.cross_entropy
        step = Optimization(loss=loss, make_optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
        engine = assemble(model, plan, step, axes=axes)
        if is_blank:
            give_memory(engine.parts, "cpu")
        shares = shares_of(engine.parts, axes, tied)
        if not is_blank:
            faults += [f"built: {fault}" for fault in differs(shares, names)]
        load_shares(shares, Path(folder) / "1")
        faults += [f"loaded (blank: {is_blank}): {fault}" for fault in differs(shares, version(1, names))]
    faults += [f"{share.name} is not contiguous" for share in shares if not share.local.is_contiguous()]
    mine = owned(shares, names)
    rank = torch.distributed.get_rank()
    zeros = write_part(mine, Path(folder) / "1", Path(folder) / f"zeros.{rank}")
    if np.any(np.fromfile(Path(folder) / f"zeros.{rank}", np.uint8)):
        faults.append("the update of an untrained model is not zeros")
    load_shares(shares, Path(folder) / "2")  # as a training that ends there
    pieces = write_part(mine, Path(folder) / "1", Path(folder) / f"part.{rank}")
    if pieces != pieces_in_order(pieces) or pieces_in_order(zeros) != zeros:
        faults.append("the pieces are not in canonical order")
    return list(pieces), faults


def boxes_of(path: Path, pieces: list[Any]) -> list[tuple[Any, np.ndarray[Any, Any]]]:
    data, begin, found = path.read_bytes(), 0, []
    for piece in pieces:
        dtype = safetensors_file.NUMPY_DTYPES[piece.dtype]
        found.append((piece, np.frombuffer(data[begin : begin + piece.num_bytes], dtype).reshape(piece.lengths)))
        begin += piece.num_bytes
    assert begin == len(data)
    return found


@pytest.mark.real
@pytest.mark.parametrize("name", [in_turn(name, number=n, days=2) for n, name in enumerate(LAYOUTS)])
def test_each_box_is_owned_once_and_goes_to_and_from_files_exactly(name: str, tmp_path: Path) -> None:
    make, degrees, _ = LAYOUTS[name]
    whole = parameters_of(make())
    for number in (1, 2):
        safetensors_file.write(tmp_path / str(number), version(number, whole), durable=False)
    results = call_on_ranks(on_a_rank, prod(degrees.values()), name, str(tmp_path))
    assert [faults for _, faults in results] == [[]] * len(results)
    times = {name: np.zeros(array.shape, int) for name, array in whole.items()}
    update = {name: np.zeros(array.shape) for name, array in whole.items()}
    for rank, (pieces, _) in enumerate(results):
        for piece, values in boxes_of(tmp_path / f"part.{rank}", pieces):
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))
            times[piece.tensor][box] += 1
            update[piece.tensor][box] = values
    before, after = version(1, whole), version(2, whole)
    for tensor, count in times.items():
        assert np.all(count == 1), tensor
        np.testing.assert_array_equal(update[tensor], (after[tensor].astype(float) - before[tensor]).astype("f4"))
    sent = [sum(piece.num_bytes for piece in pieces) for pieces, _ in results]
    assert max(sent) < 2.2 * sum(sent) / len(sent), "all ranks send about alike"


def test_copies_take_turns_by_the_layout_and_not_by_what_they_hold() -> None:
    """With uneven shards a rank holds nothing of a small tensor; a counter of its own would leave boxes to nobody."""

    def share(name: str, copy: int) -> Share:
        return Share(name, (2,), (0,), (2,), torch.zeros(2), 2, copy)

    names = ["a", "b", "c", "d"]
    held = {0: ["a", "b", "c", "d"], 1: ["b", "c", "d"], 2: ["a", "c"]}  # of copy 0, copy 1, and another box's copy 1
    first = [s.name for s in owned([share(n, 0) for n in held[0]], names)]
    second = [s.name for s in owned([share(n, 1) for n in held[1]], names)]
    assert Counter(first + second) == Counter(names)
    by_own_count = [n for turn, n in enumerate(held[0]) if turn % 2 == 0] + [
        n for turn, n in enumerate(held[1]) if turn % 2 == 1
    ]
    assert Counter(by_own_count) != Counter(names)


def alone(arrays: Arrays) -> tuple[list[Share], torch.nn.Module]:
    model = plain()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(torch.from_numpy(arrays[name]))
    return shares_of([model], None), model


def test_what_is_not_finite_is_named_and_another_model_refused(tmp_path: Path) -> None:
    whole = version(1, parameters_of(plain()))
    safetensors_file.write(tmp_path / "1", whole, durable=False)
    shares, model = alone(whole)
    first, second = list(model.state_dict().items())[:2]
    with torch.no_grad():
        first[1].view(-1)[3] = float("nan")
        second[1].view(-1)[0] = float("inf")
    with pytest.raises(NotFinite) as refusal:
        write_part(owned(shares, whole), tmp_path / "1", tmp_path / "part")
    assert all(f"infinite values in {name}" in str(refusal.value) for name, _ in (first, second))
    smaller = dict(list(whole.items())[1:]) | {second[0]: np.zeros(3, np.float32)}
    safetensors_file.write(tmp_path / "2", smaller, durable=False)
    with pytest.raises(TaskMismatch, match=r"is missing in .* expected F32"):
        load_shares(shares, tmp_path / "2")


class Counted(torch.nn.Module):
    """Integer and bool buffers, of which one difference needs a wider dtype, and a bfloat16 parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([1, 250], dtype=torch.uint8))
        self.register_buffer("seen", torch.tensor([True, False]))
        self.register_buffer("steps", torch.tensor(3))
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))


def test_integers_and_half_floats_have_the_differences_of_one_process(tmp_path: Path) -> None:
    from atoll.training.model.parameters import load_parameters, update_of

    model = Counted()
    start = parameters_of(model) | {"weight": np.array([1.001, 2.001], np.float32)}
    safetensors_file.write(tmp_path / "1", start, durable=False)
    shares = shares_of([model], None)
    load_shares(shares, tmp_path / "1")
    with torch.no_grad():
        model.count.copy_(torch.tensor([200, 3], dtype=torch.uint8))
        model.seen.fill_(False)
        model.steps.add_(4)
        model.weight.add_(0.5)
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pieces = write_part(owned(shares, start), tmp_path / "1", tmp_path / "part")
    found = {piece.tensor: values for piece, values in boxes_of(tmp_path / "part", list(pieces))}
    load_parameters(model, start)
    model.load_state_dict(after)
    for name, expected in update_of(start, model).items():
        assert found[name].dtype == expected.dtype, name
        np.testing.assert_array_equal(found[name], expected)


def test_a_codec_encodes_each_box_and_leaves_buffers_plain(tmp_path: Path) -> None:
    from atoll.parallel.exchange.write import Encoding
    from atoll.tensors.codecs.chunks import decode_range
    from atoll.tensors.codecs.names import parse_codec

    whole = version(1, parameters_of(plain()))
    safetensors_file.write(tmp_path / "1", whole, durable=False)
    shares, _ = alone(version(2, whole))
    buffer = next(iter(whole))
    pieces = write_part(
        owned(shares, whole), tmp_path / "1", tmp_path / "part", Encoding("bf16", seed=1, part=2, plain={buffer})
    )
    data, begin = (tmp_path / "part").read_bytes(), 0
    for piece in pieces:
        raw = data[begin : begin + piece.num_bytes]
        begin += piece.num_bytes
        expected = (version(2, whole)[piece.tensor] - whole[piece.tensor]).reshape(-1)
        if piece.tensor == buffer:
            assert not piece.codec
            np.testing.assert_array_equal(np.frombuffer(raw, np.float32), expected)
            continue
        if piece.codec:
            values = decode_range(
                parse_codec("bf16"), piece.num_elements, 0, piece.num_elements, lambda at, n, raw=raw: raw[at : at + n]
            )
            np.testing.assert_allclose(values, expected, rtol=2**-8)
    assert begin == len(data)
    assert sum(bool(piece.codec) for piece in pieces) == len(pieces) - 1


def test_a_blank_model_keeps_its_tables_and_ties() -> None:
    make, _, _ = LAYOUTS["tied, stages of shards"]
    model, real = blank(make), make()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert tied_names(model) == tied_names(real)
    for (name, buffer), (_, expected) in zip(model.named_buffers(), real.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    give_memory([model], "cpu")
    assert tied_names(model) == tied_names(real)
    assert not any(parameter.is_meta for parameter in model.parameters())
