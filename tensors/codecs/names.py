"""The codecs by name: the form of a chunk of a float32 update between the client and the coordinator.

    name     chunk of n elements, little-endian                        bytes                  relative to float32
    bf16     n bfloat16                                                2 n                    1/2
    fp16     n float16                                                 2 n                    1/2
    qsgd8    ceil(n/512) norms float32, n levels int8                  4 ceil(n/512) + n      0.252
    topk:F   k values float32, k indices uint16; k = ceil(F n)         6 k                    3 F / 2
    sign     scale float32, ceil(n/8) bytes of n bits, 1 for minus     4 + ceil(n/8)          1/32

Their contract: `codec`. `topk` and `sign` are biased: they need error feedback (`error_feedback`). A name with an @
belongs to a codec of an installed package (`installed`).
"""

import re
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from atoll.tensors.codecs import installed

if TYPE_CHECKING:
    from atoll.tensors.codecs.codec import Codec

FAMILIES = ("bf16", "fp16", "qsgd8", "topk", "sign")
"""The names in a run's TOML, and in an agent's list of the codecs that it supports."""

NAMES = "bf16, fp16, qsgd8, sign, topk:F with F in 0.000001..1"
"""The names that `parse_codec` allows, for its error and for `--help`."""

FAMILIES_MAX = 64
"""Largest number of codecs of installed packages that another process may name."""


@cache
def _without_options() -> "dict[str, Codec]":
    """Return the codecs without options by name; the first call imports numpy, which names alone do without."""
    from atoll.tensors.codecs.quantization import BFloat16, Float16, Qsgd, Sign

    return {codec.name: codec for codec in (BFloat16(), Float16(), Qsgd(), Sign())}


@lru_cache(maxsize=64)
def parse_codec(name: str) -> "Codec":
    """Return the codec of a name, which may come from a peer: no code is loaded.

    Raises:
        ValueError: no codec has this name, or it is an installed package's, and this process has not opened it.
    """
    if (codec := _without_options().get(name)) is not None:
        return codec
    if installed.is_installed(name):
        return installed.opened(name)
    match = re.fullmatch(r"topk:(0\.[0-9]{1,6}|1(?:\.0{1,6})?)", name)
    if match is None or float(match[1]) == 0.0:
        raise ValueError(f"codec {name!r} is not one of {NAMES}")
    from atoll.tensors.codecs.sparsification import MILLION, TopK

    return TopK(round(float(match[1]) * MILLION))


def open_codec(name: str) -> "Codec":
    """Return the codec of a name that this process may load: its run's, or one that its coordinator has admitted.

    Raises:
        ValueError: as `parse_codec`; and the package's code does not load, or is another version's.
    """
    return installed.open_named(name) if installed.is_installed(name) else parse_codec(name)


def fault_of_opening(names: Iterable[str]) -> str:
    """Open codecs that this process may load; return the reason why one is missing, "" if all are open."""
    try:
        for name in names:
            open_codec(name)
    except ValueError as fault:
        return str(fault)
    return ""


def supported() -> tuple[str, ...]:
    """Return the families of codecs of this process, built-in and of installed packages."""
    return (*FAMILIES, *installed.families())


def known_codecs(families: Iterable[str]) -> frozenset[str]:
    """Return the families that another process names, as far as they can exist here: at most a few dozen."""
    named = list(dict.fromkeys(families))
    return frozenset(FAMILIES).intersection(named).union(list(filter(installed.is_installed, named))[:FAMILIES_MAX])


def family_of(name: str) -> str:
    """Return the name without its options."""
    return name.partition(":")[0]


def codec_name(family: str, fraction: float | None) -> str:
    """Return the canonical name of a codec, which is sent and recorded.

    Args:
        family: one of `FAMILIES`.
        fraction: for "topk", the fraction of the elements that are sent, rounded to millionths.

    Raises:
        ValueError: there is no such codec.
    """
    return parse_codec(f"topk:{fraction:.6f}" if family == "topk" else family).name
