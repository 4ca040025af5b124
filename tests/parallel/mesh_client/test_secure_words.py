"""The words of a mesh for a secure sum: those of one process, masked to the same bytes by any mesh, however often."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.parallel.mesh_client.secure_words import encode_parts, mask_parts, pieces_in, plan_in
from atoll.task.errors import NotFinite, TaskMismatch
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, Tensor, pieces_in_order
from atoll.tensors.masked.encode import encode_update
from atoll.tensors.masked.mask import mask_update
from atoll.tensors.pieces import part_name
from atoll.tensors.secure.exact import decode_exact
from atoll.tensors.secure.keystream import Streams
from atoll.tensors.secure.masked_layout import EXACT
from atoll.tensors.secure.plan import Encoding, Vector
from atoll.training.worker.operations import piece_fields
from tests.parallel.mesh_client import adapter_tasks
from tests.parallel.mesh_client.clients import on_a_mesh, on_a_rank, request_of, write_version
from tests.parallel.mesh_client.clients import plan_of as plan_on
from tests.parallel.mesh_client.test_adapters import loaded
from tests.parallel.ranks import call_on_ranks
from tests.tensors.masked.members import DTYPES, meshes, plan_of, stored, update_of

KEY = bytes(range(32)).hex()


class Threads:
    """One of several ranks that are threads."""

    def __init__(self, rank, table, barrier):
        self.rank, self.size, self._table, self._barrier = rank, len(table), table, barrier

    @property
    def is_first(self):
        return self.rank == 0

    def gather(self, value):
        self._table[self.rank] = json.dumps(value)
        self._barrier.wait()
        found = [json.loads(text) for text in self._table]
        self._barrier.wait()
        return found


def on_threads(size, work):
    """The result of `work(ranks)` at the first of some ranks; the first rank's error."""
    table, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(work, Threads(rank, table, barrier)) for rank in range(size)]
        first, *_ = [each.result() for each in running]
        return first


def order_of(plan, out):
    encoding = Encoding(**{each.name: getattr(plan, each.name) for each in fields(Encoding)})
    return json.loads(json.dumps({**asdict(encoding), "out": str(out), "rounding": KEY}))


def owned_at_random(boxes, layout, size, draw):
    """The boxes of each rank: some ranks have none, perhaps the first."""
    owners = [[] for _ in range(size)]
    for tensor in layout:
        for box in boxes[tensor.name]:
            owners[int(draw.integers(size))].append((tensor.name, *box))
    return owners


def write_plain(folder, update, owners):
    """Write plain parts as `exchange/write` does; return the pieces of each rank."""
    folder.mkdir()
    found, index = [], 0
    for boxes in owners:
        names = {dtype: name for name, dtype in {**DTYPES, "I16": np.int16}.items()}
        pieces = pieces_in_order(Piece(n, names[update[n].dtype.type], o, k, "") for n, o, k in boxes)
        if pieces:
            raw = [np.ascontiguousarray(update[p.tensor][at(p)]).tobytes() for p in pieces]
            (folder / part_name(index)).write_bytes(b"".join(raw))
            index += 1
        found.append(piece_fields(pieces))
    return found


def at(piece):
    return tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))


def encoded_by_a_mesh(folder, layout, update, plan, owners):
    """Encode on ranks; return the pieces of the encoded parts."""
    version = stored(folder / "version", {t.name: np.zeros(t.shape, VERSION[t.dtype]) for t in layout})
    parts = write_plain(folder / "plain", update, owners)

    def encode(ranks):
        mine = plan_in(order_of(plan, folder / "words"), plan.num_examples, plan.statistics)
        return encode_parts(order_of(plan, folder / "words"), version, folder / "plain", parts, mine, ranks)

    answer = on_threads(len(owners), encode)
    assert not (folder / "plain").exists(), "a plain part is no longer needed"
    return answer


VERSION = {"F32": np.float32, "I64": np.int64, "U8": np.uint8}


def masked_by_a_mesh(folder, vector, parts, streams, size, name):
    """Mask encoded parts on ranks; return the words of each tensor, and the bytes of the parts."""
    (folder / name).mkdir()
    request = {
        "layout": [(t.name, t.dtype, t.shape) for t in vector.masked],
        "parts": [
            {
                "encoded": str(folder / "words" / part_name(index)),
                "out": str(folder / name / part_name(index)),
                "pieces": pieces,
            }
            for index, pieces in enumerate(parts)
        ],
    }
    request, keys = json.loads(json.dumps(request)), [(key.hex(), sign) for key, sign in streams]
    answer = on_threads(size, lambda ranks: mask_parts(request, keys if ranks.is_first else (), ranks))
    raw = [(folder / name / part_name(index)).read_bytes() for index in range(len(parts))]
    return words_in(vector, answer["parts"], raw), raw


def words_in(vector, parts, raw):
    """The tensors that parts have, each element once."""
    dtypes = {"I32": np.int32, "I64": np.int64}
    found = {t.name: np.zeros(t.shape, dtypes[t.dtype]) for t in vector.masked}
    times = {t.name: np.zeros(t.shape, int) for t in vector.masked}
    for pieces, data in zip(parts, raw, strict=True):
        position = 0
        for piece in pieces_in(pieces):
            values = np.frombuffer(data, found[piece.tensor].dtype, piece.num_elements, position)
            found[piece.tensor][at(piece)] = values.reshape(piece.lengths)
            times[piece.tensor][at(piece)] += 1
            position += piece.num_bytes
        assert position == len(data)
    assert all((count == 1).all() for count in times.values())
    return found


@given(st.integers(3, 6), meshes(), meshes(), st.sampled_from([32, 64]), st.integers(0, 2**20), st.data())
@settings(max_examples=30, deadline=None)
def test_the_opened_sum_of_plain_and_mesh_clients_is_that_of_plain_ones(
    tmp_path_factory, members, first, other, bits, seed, data
):
    """Each member is a process or a mesh; some are lost after their masks were agreed; each part is masked twice."""
    draw, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("sum")
    boxes = {"n": first[1], "s": [((), ())], "v": other[1], "w": first[1]}
    shapes = {"n": first[0], "s": (), "v": other[0], "w": first[0]}
    layout = tuple(Tensor(name, "I64" if name == "n" else "F32", shape) for name, shape in shapes.items())
    keys = {pair: os.urandom(32) for pair in combinations(range(members), 2)}
    own = [os.urandom(32) for _ in range(members)]
    survivors = sorted(data.draw(st.sets(st.integers(0, members - 1), min_size=2), label="survivors"))
    vector = Vector(layout, plan_of(layout, bits))
    total = {t.name: np.zeros(t.shape, np.uint32 if t.dtype == "I32" else np.uint64) for t in vector.masked}
    expected = {name: array.copy() for name, array in total.items()}
    for member in survivors:
        here, update = folder / str(member), update_of(layout, seed + member, float(draw.uniform(0.01, 2)))
        here.mkdir()
        plan = replace(plan_of(layout, bits), num_examples=int(draw.integers(1, 200)))
        streams = [(own[member], 1)]
        streams += [(key, 1 if member == a else -1) for (a, b), key in keys.items() if member in (a, b)]
        path = stored(here / "update", update)
        encode_update(path, here / "one", layout=layout, plan=plan, rounding=bytes.fromhex(KEY))
        words = safetensors_file.read(here / "one")
        if draw.random() < 0.7:
            owners = owned_at_random(boxes, layout, int(draw.integers(1, 6)), draw)
            answer = encoded_by_a_mesh(here, layout, update, plan, owners)
            size = int(draw.integers(1, 6))  # of another mesh, after a restart
            masked, raw = masked_by_a_mesh(here, vector, answer["parts"], streams, size, "masked")
            assert masked_by_a_mesh(here, vector, answer["parts"], streams, 1, "again")[1] == raw
        else:
            mask_update(here / "one", here / "masked", vector.masked, streams)
            masked = safetensors_file.read(here / "masked")
        for name, array in masked.items():
            total[name] += array.view(total[name].dtype)
            expected[name] += words[name].view(total[name].dtype)
    opening = [(own[member], -1) for member in survivors]
    for (a, b), key in keys.items():
        if (a in survivors) != (b in survivors):
            opening.append((key, -1 if a in survivors else 1))
    for tensor in vector.masked:
        flat = total[tensor.name].reshape(-1)
        Streams(opening).add(flat, vector.starts[tensor.name])
        assert np.array_equal(flat, expected[tensor.name].reshape(-1)), tensor.name
    sums = decode_exact(total[EXACT], vector.exact, len(survivors))
    assert sums.statistics["loss"] == (1.5 * len(survivors), 40.0 * len(survivors))


def test_the_norm_is_of_the_whole_update_and_each_rank_clips_by_it(tmp_path):
    layout = (Tensor("w", "F32", (4,)),)
    plan = plan_of(layout, 64, num_examples=100)
    boxes = [[("w", (0,), (2,))], [("w", (2,), (2,))]]
    answer = encoded_by_a_mesh(tmp_path, layout, {"w": np.array([3.0, 0, 0, 4.0], np.float32)}, plan, boxes)
    assert answer["encoded"] == {"norm": 5.0, "factor": 0.2, "left_out": []}
    raw = [(tmp_path / "words" / part_name(index)).read_bytes() for index in range(2)]
    words = words_in(Vector(layout, plan), answer["parts"], raw)["w"]
    assert np.abs(words / (2**43 - 1) - [0.6, 0, 0, 0.8]).max() < 1e-12


@pytest.mark.parametrize(
    ("update", "boxes", "error", "words"),
    [
        ([1.0, np.nan], [[("w", (0,), (1,))], [("w", (1,), (1,))]], NotFinite, "NaN or infinite values in w"),
        ([1.0, 2.0], [[("w", (0,), (1,))], []], TaskMismatch, "not what a secure sum adds: "),
    ],
)
def test_an_update_that_no_sum_takes_fails_on_all_ranks_before_a_word_is_written(tmp_path, update, boxes, error, words):
    layout = (Tensor("w", "F32", (2,)),)
    with pytest.raises(error, match=words):
        encoded_by_a_mesh(tmp_path, layout, {"w": np.array(update, np.float32)}, plan_of(layout), boxes)
    assert sorted((tmp_path / "words").glob("*")) == []


def test_a_damaged_encoded_part_is_masked_by_no_rank(tmp_path):
    layout = (Tensor("w", "F32", (4,)),)
    plan, vector = plan_of(layout), Vector(layout, plan_of(layout))
    boxes = [[("w", (0,), (2,))], [("w", (2,), (2,))]]
    answer = encoded_by_a_mesh(tmp_path, layout, {"w": np.ones(4, np.float32)}, plan, boxes)
    part = tmp_path / "words" / part_name(1)
    part.write_bytes(bytes(len(part.read_bytes())))
    with pytest.raises(OSError, match="is not as it was encoded"):
        masked_by_a_mesh(tmp_path, vector, answer["parts"], [(os.urandom(32), 1)], 2, "masked")


def test_the_integers_of_ranks_may_have_other_dtypes(tmp_path):
    """A difference of bytes that does not fit a byte has 16 bits, at the rank where it occurs."""
    layout = (Tensor("n", "U8", (4,)), Tensor("w", "F32", (2,)))
    plan, vector = plan_of(layout, num_examples=100), Vector(layout, plan_of(layout))
    stored(tmp_path / "version", {"n": np.zeros(4, np.uint8), "w": np.zeros(2, np.float32)})
    (tmp_path / "plain").mkdir()
    raw = [np.ones(2, np.float32).tobytes() + np.array([3, 4], np.uint8).tobytes(), np.array([-1, 7], "<i2").tobytes()]
    pieces = [
        (Piece("w", "F32", (0,), (2,), ""), Piece("n", "U8", (0,), (2,), "")),
        (Piece("n", "I16", (2,), (2,), ""),),
    ]
    for index, data in enumerate(raw):
        (tmp_path / "plain" / part_name(index)).write_bytes(data)
    parts, order = [piece_fields(each) for each in pieces], order_of(plan, tmp_path / "words")
    answer = on_threads(
        2, lambda ranks: encode_parts(order, tmp_path / "version", tmp_path / "plain", parts, plan, ranks)
    )
    (part,) = answer["parts"]
    words = words_in(vector, [part], [(tmp_path / "words" / part_name(0)).read_bytes()])
    sums = decode_exact(words[EXACT].view(np.uint64), vector.exact, 1)
    assert [int(each) >> 52 for each in sums.integers["n"]] == [3, 4, -1, 7]


MESHES = {
    "fsdp": {"dp_shard": 2},
    "tp": {"tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "pp x fsdp": {"pp": 2, "dp_shard": 2},
}
CASES = [
    ("task", "pp x fsdp"),
    ("drawn", "fsdp"),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (("task", "tp"), ("task", "hsdp"), ("lora_on_llama", "fsdp"))
    ),
]


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_the_ranks_of_a_training_encode_what_one_process_would_of_their_update(tmp_path, name, mesh):
    """Copies take turns, stages own their tensors, and of a task whose trained tensors travel the vector is these."""
    load = loaded(name, tmp_path) if name in adapter_tasks.tasks else {}
    options = {"name": name, "load": load, "model_seed": 3}
    if name != "task":
        options["local"] = {"model.frozen": write_version(tmp_path, name, **load)}
    else:
        write_version(tmp_path)
    layout = safetensors_file.parse_header(tmp_path / "version")[0]
    plain, update = on_a_mesh(tmp_path, MESHES[mesh], **options)
    plan = plan_of(
        layout,
        num_examples=plain["num_examples"],
        metrics=tuple(sorted((name, len(sums)) for name, sums in plain["statistics"].items())),
        statistics=plain["statistics"],
        clip_norm=0.05,
    )
    path = stored(tmp_path / "update", update)
    done = encode_update(path, tmp_path / "one", layout=layout, plan=plan, rounding=bytes.fromhex(KEY))
    options.pop("name")
    request = request_of(tmp_path, "mesh", secure=order_of(plan, tmp_path / "words"), **options)
    answer = call_on_ranks(
        on_a_rank, plan_on(MESHES[mesh]).mesh.size, name, MESHES[mesh], options.pop("load"), request
    )[0]
    assert answer["encoded"]["norm"] == pytest.approx(done.norm, rel=1e-12)
    assert answer["encoded"]["left_out"] == []
    raw = [(tmp_path / "words" / part_name(index)).read_bytes() for index in range(len(answer["parts"]))]
    words, expected = words_in(Vector(layout, plan), answer["parts"], raw), safetensors_file.read(tmp_path / "one")
    assert expected.keys() == {tensor.name for tensor in layout if tensor.dtype == "F32"} | {EXACT}
    for name in expected:
        assert np.array_equal(words[name], expected[name]), name
