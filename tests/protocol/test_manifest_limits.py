"""Models that fit into manifests, just and just not."""

from dataclasses import replace

import pytest

from atoll.ground.strict_json import ManifestError
from atoll.protocol.manifest import MANIFEST_BYTES_MAX, UpdateManifest, VersionManifest, parse_update, parse_version
from atoll.protocol.manifest_limits import check_model_travels
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.tensors.layout import Tensor
from atoll.tensors.pieces import cut_layout

NONE = "0" * 64


def model(num_tensors, shape=(1,), name="layers.{:06d}.weight", piece_bytes=2**22):
    layout = tuple(Tensor(name.format(k), "F32", shape) for k in range(num_tensors))
    pieces = tuple(replace(piece, sha256=NONE) for piece in cut_layout(layout, piece_bytes))
    return VersionManifest(layout, pieces, piece_bytes)


def update_of(version, codec):
    """An ordinary update of a model, as an agent sends it after a round."""
    num_bytes = {"": 0, "topk:0.01": 6, "qsgd8": 5}[codec]  # of one value
    pieces = tuple(replace(p, codec=codec, encoded_bytes=num_bytes) if codec else p for p in version.pieces)
    return UpdateManifest(
        RunId("run-1"), RoundId(7), ClientId("north"), Version(6), Digest(NONE), 120, 0.5, pieces
    ).encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", ["", *(pytest.param(name, marks=pytest.mark.long) for name in ("topk:0.01", "qsgd8"))]
)
def test_what_is_admitted_can_be_sent_and_read_and_little_more_could(codec):
    sizes = [max(len(model(num).encode()), len(update_of(model(num), codec))) for num in (1_000, 2_000)]
    of_one = (sizes[1] - sizes[0]) / 1_000  # every entry has as many bytes as the next
    fits = int((MANIFEST_BYTES_MAX - sizes[0]) / of_one) + 1_000
    admitted = model(fits - 10)
    check_model_travels(admitted, codec)
    assert parse_version(admitted.encode()) == admitted
    assert len(parse_update(update_of(admitted, codec)).pieces) == fits - 10
    with pytest.raises(ManifestError, match="in an update takes" if codec else "in a version takes"):
        check_model_travels(model(fits + 1), codec)


@pytest.mark.slow
def test_the_fault_names_the_tensors_their_bytes_and_what_is_allowed():
    fault = r"^the model has 30000 tensors in 30000 pieces, and the list of them in a version takes \d+ bytes; "
    fault += r"allowed: 3932160 bytes, which is about 2\d{4} tensors with such names: keep several small tensors as one"
    with pytest.raises(ManifestError, match=fault):
        check_model_travels(model(30_000))


@pytest.mark.slow
def test_many_pieces_of_few_tensors_are_counted_too():
    with pytest.raises(ManifestError, match="the model has 1 tensor in 65537 pieces; allowed: 65536 pieces"):
        check_model_travels(model(1, shape=(65_537, 2**20)))


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (model(1, shape=(1,) * 9), r"the model cannot be sent: .*shape"),
        (model(1, name="x" * 1025), r"the model cannot be sent: .*name"),
        (model(1, name="__metadata__"), r"the model cannot be sent: .*__metadata__"),
    ],
    ids=["dimensions", "name", "reserved"],
)
def test_a_tensor_that_no_manifest_takes_is_named_before_a_run(wrong, fault):
    with pytest.raises(ManifestError, match=fault):
        check_model_travels(wrong)


def test_an_ordinary_model_travels():
    check_model_travels(model(300, shape=(64, 64)), "topk:0.01")
