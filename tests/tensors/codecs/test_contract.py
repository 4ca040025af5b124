"""The check of a codec against its contract: no fault of the built-in ones, each fault of a broken one."""

import time
from typing import Any

import numpy as np
import pytest

from atoll.tensors.codecs.codec import CodecBroken
from atoll.tensors.codecs.contract import codec_faults, faults_without_options
from atoll.tensors.codecs.custom_codec import CHUNK_BYTES_MAX, CustomCodec
from atoll.tensors.codecs.error_feedback import encode_with_feedback
from atoll.tensors.codecs.names import FAMILIES, codec_name, parse_codec
from tests.plugins.packages import CODEC

MODULE: dict[str, Any] = {}
exec(CODEC, MODULE)
Rounded: Any = MODULE["Rounded"]


class Plain:
    """Float32 as it is, from which the broken codecs below differ in one way each."""

    is_biased = False

    def num_bytes(self, n: int) -> Any:
        return 4 * n

    def encode(self, values: Any, rng: Any) -> Any:
        return values.astype("<f4").tobytes()

    def decode(self, data: bytes, n: int) -> Any:
        found = np.frombuffer(data, "<f4")
        if not np.isfinite(found).all():
            raise ValueError("not finite")
        return found.astype(np.float32)


def broken(**changes: Any) -> Any:
    return type("Broken", (Plain,), changes)()


def uniform(n: int) -> Any:
    return np.random.rand(n).astype("<f4")


def raises(error: BaseException) -> Any:
    def method(*_: Any) -> Any:
        raise error

    return method


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_built_in_codecs_have_no_fault(family: str) -> None:
    for fraction in (0.001, 0.01, 1.0) if family == "topk" else (None,):
        assert codec_faults(parse_codec(codec_name(family, fraction))) == []


def test_a_right_codec_of_ones_own_has_no_fault() -> None:
    for codec in (Plain(), Rounded(), Rounded(levels=1), Rounded(levels=127)):
        assert codec_faults(codec) == []


@pytest.mark.parametrize(
    ("codec", "told"),
    [
        (object(), "is of the type object; allowed: an object with the methods `num_bytes`, `encode` and `decode`"),
        (Plain, "is the class Plain; allowed: an object"),
        (broken(is_biased=None), "is_biased is None; allowed: True or False"),
        (broken(is_biased=property(raises(KeyError("x")))), "is_biased raised KeyError: 'x'"),
        (broken(num_bytes=lambda self, n: 4.0 * n), "num_bytes(1) raised TypeError: "),
        (broken(num_bytes=lambda self, n: 0), f"num_bytes(1) is 0; allowed: 1..{CHUNK_BYTES_MAX}"),
        (broken(num_bytes=lambda self, n: n > 0), "num_bytes(1) raised TypeError: True is not a whole number"),
        (broken(num_bytes=lambda self, n: 1 << 40), f"num_bytes(1) is {1 << 40}; allowed"),
        (broken(num_bytes=lambda self, n: 4 * n + 1), "encode returned 4 bytes for 1 element, not 5"),
        (broken(encode=lambda self, values, rng: None), "encode returned an object of the type NoneType, not bytes"),
        (broken(encode=raises(SystemExit(3))), "encode raised SystemExit: 3"),
        (
            broken(encode=lambda self, values, rng: np.random.rand(len(values)).astype("<f4").tobytes()),
            "are other bytes when they are",
        ),
        (broken(encode=lambda self, values, rng: values.__imul__(2).tobytes()), "read-only"),
        (broken(decode=raises(KeyError("y"))), "decode raised KeyError: 'y'"),
        (broken(decode=raises(SystemExit(3))), "decode raised SystemExit: 3"),
        (
            broken(decode=lambda self, data, n: [0.0] * n),
            "decode returned an object of the type list, not float32 (1,)",
        ),
        (broken(decode=lambda self, data, n: np.zeros(n)), "decode returned float64 (1,), not float32 (1,)"),
        (broken(decode=lambda self, data, n: np.zeros((n, 1), np.float32)), "decode returned float32 (1, 1), not"),
        (broken(decode=lambda self, data, n: np.zeros(n + 1, np.float32)), "decode returned float32 (2,), not"),
        (broken(decode=lambda self, data, n: np.full(n, np.nan, np.float32)), "a value is not finite"),
        (broken(decode=lambda self, data, n: uniform(n)), "other values when they are"),
        (broken(decode=lambda self, data, n: np.ones(n, np.float32)), "zeros do not come back as zeros"),
        (
            broken(is_biased=True, decode=lambda self, data, n: -Plain().decode(data, n)),
            "is_biased, and no contraction",
        ),
        (
            broken(is_biased=True, decode=lambda self, data, n: 0 * Plain().decode(data, n)),
            "the mean of ||C(x) - x||^2 is 1 ||x||^2; allowed: below 1",
        ),
        (
            broken(decode=lambda self, data, n: Plain().decode(data, n if data[0] < 255 else {}[data[0]])),
            "of bytes that no encoder writes it must raise ValueError",
        ),
    ],
)
def test_each_fault_is_told(codec: Any, told: str) -> None:
    assert any(told in fault for fault in codec_faults(codec)), codec_faults(codec)


def test_what_an_entry_point_names_is_checked_as_far_as_it_needs_no_options() -> None:
    assert faults_without_options(Rounded) == []
    assert faults_without_options(Rounded(levels=2)) == []
    assert faults_without_options(lambda levels: None) == [], "it needs an argument, which no list has"
    assert "is of the type NoneType" in faults_without_options(lambda: None)[0]
    assert faults_without_options(raises(OSError("no file"))) == ["aggregation.codec_options: OSError: no file"]


def test_the_guard_hands_out_nothing_that_user_code_could_change() -> None:
    kept: list[Any] = []

    class Keeps(Plain):
        def decode(self, data: bytes, n: int) -> Any:
            kept.append(super().decode(data, n))
            return kept[-1]

    codec, values = CustomCodec("keeps", Keeps()), np.ones(3, np.float32)
    out = np.empty(3, np.float32)
    assert codec.decode(codec.encode(values, np.random.default_rng(0)), 3, out) is out
    kept[0][:] = 7
    assert out.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="keeps: 11 bytes for 3 elements, not 12"):
        codec.decode(bytes(11), 3)
    with pytest.raises(ValueError, match="not within"):
        codec.encode(np.array([np.inf], np.float32), np.random.default_rng(0))


def test_a_size_is_asked_for_once() -> None:
    sizes = iter((4, 1000))
    codec = CustomCodec("moody", broken(num_bytes=lambda self, n: next(sizes)))
    assert [codec.num_bytes(1), codec.num_bytes(1), codec.num_bytes(0)] == [4, 4, 0]


def test_a_codec_that_refuses_its_own_bytes_breaks_the_error_feedback() -> None:
    codec = CustomCodec("moody", broken(is_biased=True, decode=raises(ValueError("never"))))
    with pytest.raises(CodecBroken, match="moody refuses what it has written: moody: decode: never"):
        encode_with_feedback(codec, np.ones(2, np.float32), np.zeros(2, np.float32), np.random.default_rng(0))


def test_the_check_takes_no_longer_than_a_start_may() -> None:
    began = time.process_time()
    codec_faults(Rounded())
    assert time.process_time() - began < 5.0
