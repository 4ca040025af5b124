"""The contents of a run's messages on disk, each once, by the digest of its manifest.

    contents/<digest>.safetensors  +  <digest>.manifest.json      sent like a version

The program's process writes the tensors; the manifest, which makes the content exist, is written when a message
names it. A content that no exchange needs is deleted; a program that sends it again writes it again.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from atoll.ground.durable import write_atomically
from atoll.protocol.manifest import VersionManifest, parse_version
from atoll.protocol.vocabulary import Digest, Version
from atoll.protocol.wire.channel import INLINE_BYTES_MAX
from atoll.server.files.run_store import RunStore
from atoll.server.files.versions import VersionFile
from atoll.tensors.layout import Piece
from atoll.tensors.safetensors_file import parse_header

CACHED_MAX = 64


class Contents:
    """Contents of one run. All of it runs on one event loop.

    Args:
        folder: the folder of the run.
        store: the files of the replies.
    """

    def __init__(self, folder: Path, store: RunStore) -> None:
        self.store, self.folder = store, folder
        self._folder = folder / "contents"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._offered: dict[Digest, bytes] = {}  # manifests of contents that are being written
        self._cache: dict[Digest, VersionFile] = {}
        self._pins = Counter[Digest]()  # contents that a call has offered and not sent yet, by the number of offers
        self._known = {Digest(name.partition(".")[0]) for name in os.listdir(self._folder)}

    def offer(self, pieces: tuple[Piece, ...], piece_bytes: int) -> tuple[Digest, Path | None]:
        """Return the digest of a content, and the path to write it to (None: it exists); it is kept until `sent`."""
        manifest = VersionManifest.of(pieces, piece_bytes=piece_bytes)
        digest = manifest.digest
        self._pins[digest] += 1
        self._known.add(digest)
        if self.by_digest(digest) is not None:
            return digest, None
        self._offered[digest] = manifest.encode()
        return digest, self._path(digest)

    def keep(self, digest: Digest) -> VersionFile:
        """Make an offered content exist, if it does not yet, and return it.

        Raises:
            OSError: its file is missing.
            ValueError: it was not offered, or its file is of another size.
        """
        if (encoded := self._offered.pop(digest, None)) is not None:
            manifest, path = parse_version(encoded), self._path(digest)
            _, data_start = parse_header(path)
            if path.stat().st_size != data_start + manifest.num_bytes:
                raise ValueError(f"{path} has another size than its manifest")
            write_atomically(self._manifest_path(digest), encoded)
        if (file := self.by_digest(digest)) is None:
            raise ValueError(f"there is no content {digest[:12]}")
        return file

    def sent(self, offered: Iterable[Digest]) -> None:
        """Record that a call has sent contents; each is listed as often as the call has offered it."""
        self._pins -= Counter(offered)

    def forget_offers(self) -> None:
        """Record that the process of the program has ended: it will not send its offered contents."""
        self._pins.clear()
        self._offered.clear()

    def drop_unused(self, used: Collection[Digest]) -> None:
        """Delete all contents except these and offered ones."""
        for digest in self._known - self._pins.keys() - set(used):
            self._known.discard(digest)
            self._cache.pop(digest, None)
            for path in (self._manifest_path(digest), self._path(digest)):
                path.unlink(missing_ok=True)

    def by_digest(self, digest: str) -> VersionFile | None:
        """Return a content as a file to send; None: there is none."""
        key = Digest(digest)
        if (cached := self._cache.get(key)) is not None:
            return cached
        path = self._manifest_path(key)
        if len(digest) != 64 or not digest.isalnum() or not path.exists():
            return None
        file = self._cache[key] = self._file(key, path.read_bytes())
        while len(self._cache) > CACHED_MAX:
            del self._cache[next(iter(self._cache))]
        return file

    def _file(self, digest: Digest, encoded: bytes) -> VersionFile:
        manifest, path = parse_version(encoded), self._path(digest)
        _, start = parse_header(path)
        small = b""
        if manifest.num_bytes <= INLINE_BYTES_MAX:
            with path.open("rb") as file:
                file.seek(start)
                small = file.read(manifest.num_bytes)
        return VersionFile(Version(0), digest, path, manifest, encoded, start, range(manifest.num_bytes), small)

    def _path(self, digest: Digest) -> Path:
        return self._folder / f"{digest}.safetensors"

    def _manifest_path(self, digest: Digest) -> Path:
        return self._folder / f"{digest}.manifest.json"
