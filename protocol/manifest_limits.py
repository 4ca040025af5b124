"""The check, before a run begins, that manifests of a model and its updates stay within the limits.

A manifest has an entry for each tensor (of a large one: for each piece), so a model of many small tensors exceeds the
limit of a message although it has few bytes.
"""

import sys
from dataclasses import replace

from atoll.aggregation.fold.weights import NORMALIZER_MAX
from atoll.ground.printable import count_of
from atoll.ground.strict_json import INT64_MAX, ManifestError
from atoll.protocol.manifest import (
    ID_MAX,
    MANIFEST_BYTES_MAX,
    PIECES_MAX,
    UpdateManifest,
    VersionManifest,
    parse_version,
)
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.tensors.codecs.chunks import encoded_bytes
from atoll.tensors.codecs.names import parse_codec

WAY_OUT = (
    "keep several small tensors as one (a parameter of shape (layers, ...) whose rows the layers use), give them "
    "shorter names, or exclude what need not be sent (persistent=False, local.keep)"
)


def check_model_travels(manifest: VersionManifest, codec: str = "") -> None:
    """Check that the manifests of a model's versions and updates fit into messages.

    Args:
        manifest: the manifest of a version of the model.
        codec: the codec of the updates; empty: plain.

    Raises:
        ManifestError: a manifest would have too many bytes or pieces, or cannot contain a tensor's name or shape.
    """
    num_pieces, num_tensors = len(manifest.pieces), len(manifest.layout)
    has = f"the model has {count_of(num_tensors, 'tensor')} in {count_of(num_pieces, 'piece')}"
    if num_pieces > PIECES_MAX:
        raise ManifestError(f"{has}; allowed: {PIECES_MAX} pieces: {WAY_OUT}")
    for what, num_bytes in (
        ("a version", len(manifest.encode())),
        ("an update", len(_largest_update(manifest, codec).encode())),
    ):
        if num_bytes > MANIFEST_BYTES_MAX:
            about = MANIFEST_BYTES_MAX * num_tensors // num_bytes
            raise ManifestError(
                f"{has}, and the list of them in {what} takes {count_of(num_bytes, 'byte')}; allowed: "
                f"{MANIFEST_BYTES_MAX} bytes, which is about {count_of(about, 'tensor')} with such names: {WAY_OUT}"
            )
    try:
        parse_version(manifest.encode())
    except ManifestError as error:
        raise ManifestError(f"the model cannot be sent: {error}") from error


def _largest_update(version: VersionManifest, codec: str) -> UpdateManifest:
    """Return the update of a model whose manifest has the most bytes."""
    digest = "0" * 64
    return UpdateManifest(
        run_id=RunId("r" * ID_MAX),
        round_id=RoundId(INT64_MAX),
        client_id=ClientId("c" * ID_MAX),
        base_version=Version(INT64_MAX),
        base_digest=Digest(digest),
        num_examples=-sys.float_info.min,  # 24 characters
        work=1 / 3,
        pieces=tuple(
            replace(piece, codec=codec, encoded_bytes=encoded_bytes(parse_codec(codec), piece.num_elements))
            if codec and piece.dtype == "F32"
            else piece
            for piece in version.pieces
        ),
        normalizer=NORMALIZER_MAX - 1 / 3,
        effective_steps=NORMALIZER_MAX - 1 / 3,
    )
