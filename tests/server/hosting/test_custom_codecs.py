"""An installed package's codec over real gRPC: sizes, faults of its code, and what a restart finds."""

import asyncio
import hashlib
import sys
from dataclasses import replace

import numpy as np
import pytest

from atoll.server.errors import OperatorError
from atoll.tensors.codecs import installed
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import pieces_in_order
from atoll.tensors.safetensors_file import read
from tests.plugins.packages import CODEC, install
from tests.wire.live_coordinator import running, update_of
from tests.wire.test_bad_input import refused
from tests.wire.test_round import committed, live, report

MOODY = '''
import time
from pathlib import Path


class Moody(Rounded):
    """Rounded, with moods at one step."""

    def decode(self, data, n):
        mood = data[4] if data[:4] == np.float32(777).tobytes() else 0
        if mood == 1:
            raise SystemExit("I leave")
        if mood == 2:
            return {}["no key"]
        if mood == 3:
            return np.zeros(n)
        if mood == 4:
            return np.full(n, np.inf, np.float32)
        if mood == 5:
            while not Path(__file__).with_name("go").exists():
                time.sleep(0.01)
        return super().decode(data, n)
'''
MODULE = "acme_codecs_on_the_wire"


def fresh_process(monkeypatch):
    """As of a process that has loaded no codec."""
    for name in ("_BY_SETTING", "_OPENED", "_LOADED"):
        monkeypatch.setattr(installed, name, {})
    parse_codec.cache_clear()
    sys.modules.pop(MODULE, None)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The module's file, and the codec's family."""
    points = {"atoll.codecs": {"moody": f"{MODULE}:Moody"}}
    folder = install(tmp_path / "site", "acme-codecs", modules={MODULE: CODEC + MOODY}, points=points)
    monkeypatch.syspath_prepend(folder)
    fresh_process(monkeypatch)
    (family,) = installed.families()
    return folder / f"{MODULE}.py", family


def encoded_update(invite, client, version, codec, step, levels, *, more=b""):
    """An update whose tensor `w` is encoded by hand."""
    pieces, raws = [], {}
    for piece in version.pieces:
        raw = np.zeros(piece.lengths, np.int64).tobytes()
        if piece.tensor == "w":
            raw = np.float32(step).tobytes() + np.array(levels, np.int8).tobytes() + more
            piece = replace(piece, codec=codec, encoded_bytes=len(raw))
        raws[piece.tensor] = raw
        pieces.append(replace(piece, sha256=hashlib.sha256(raw).hexdigest()))
    ordered = pieces_in_order(pieces)
    plain, _ = update_of(invite, client, version)
    return replace(plain, pieces=ordered), b"".join(raws[piece.tensor] for piece in ordered)


BAD = [
    (777, [1, 0, 0, 0], b"", "bad_encoding", "decode raised SystemExit: I leave"),
    (777, [2, 0, 0, 0], b"", "bad_encoding", "decode raised KeyError: 'no key'"),
    (777, [3, 0, 0, 0], b"", "bad_encoding", "decode returned float64 (4,), not float32 (4,)"),
    (777, [4, 0, 0, 0], b"", "bad_encoding", "a value is not finite"),
    (1, [8, 0, 0, 0], b"", "bad_encoding", "decode: a step or a level that no encoder writes"),
    (1, [1, 0, 0, 0], b"x", "wrong_codec", "'w' is encoded with {} in 9 bytes; allowed of its elements: 8"),
    (1, [1, 0, 0], b"", "wrong_codec", "'w' is encoded with {} in 7 bytes; allowed of its elements: 8"),
]


@pytest.mark.parametrize(("step", "levels", "more", "reason", "fault"), BAD, ids=[bad[-1][-16:] for bad in BAD])
def test_faults_of_the_codec_cost_one_update(tmp_path, package, step, levels, more, reason, fault):
    @live
    async def check(tmp_path):
        def make(invite, version):
            return encoded_update(invite, "a", version, package[1], step, levels, more=more)

        verdict, client = await refused(tmp_path / "run", make, aggregation__codec="moody")
        assert verdict.reason == client.reason == reason
        assert fault.format(package[1]) in verdict.detail

    check(tmp_path)


@live
async def test_another_version_is_refused_by_name(tmp_path, package):
    other = package[1][:-8] + "01234567"

    def make(invite, version):
        return encoded_update(invite, "a", version, other, 1, [1, 0, 0, 0])

    verdict, _ = await refused(tmp_path / "run", make, aggregation__codec="moody")
    assert verdict.reason == "wrong_codec"
    assert verdict.detail == f"the update is encoded with {other}; allowed: {package[1]}, or plain values"


@live
async def test_a_slow_codec_delays_its_verdict_alone(tmp_path, package):
    """Other clients are answered while it decodes."""
    settings = {"rounds": 1, "aggregation__codec": "moody"}
    async with running(tmp_path / "state", **settings) as it:
        async with it.client("a", codecs=[package[1]]) as a, it.client("b", codecs=["bf16"]) as b:
            slow, plain = await a.next("invite"), await b.next("invite")
            assert (slow.codec, plain.codec) == (package[1], "")
            version, _, _ = await a.download(slow)
            manifest, data = encoded_update(slow, "a", version, package[1], 777, [5, 0, 0, 0])
            upload = asyncio.create_task(a.upload(manifest, b"", data=data))
            await asyncio.sleep(0.2)
            assert (await b.upload(*update_of(plain, "b", version, value=0.0))).accepted
            assert not upload.done()
            package[0].with_name("go").touch()
            assert (await upload).accepted
            await committed(it, 1)
            np.testing.assert_array_equal(read(it.run.reducer.version(1).path)["w"], [777 * 5 / 2, 0, 0, 0])


@live
async def test_updates_that_wait_for_their_fold_need_the_version_that_has_written_them(tmp_path, package, monkeypatch):
    path, family = package
    settings = {"rounds": 1, "aggregation__codec": "moody"}
    async with running(tmp_path / "state", **settings) as it, it.client("a", codecs=[family]) as a, it.client("b"):
        invite = await a.next("invite")
        version, _, _ = await a.download(invite)
        assert (await a.upload(*encoded_update(invite, "a", version, family, 1, [4, 0, 0, 0]))).accepted
    source = path.read_text()
    path.write_text(source + "\nLATER = 1\n")
    fresh_process(monkeypatch)
    told = f"updates that wait for their fold are encoded with {family}, and moody@1.2-"
    with pytest.raises(OperatorError, match=told):
        async with running(tmp_path / "state", **settings):
            pass
    path.write_text(source)
    fresh_process(monkeypatch)
    async with running(tmp_path / "state", **settings) as it, it.client("b") as b:
        assert (await report(b, 0.0))[1].accepted
        await committed(it, 1)
        np.testing.assert_array_equal(read(it.run.reducer.version(1).path)["w"], [2, 0, 0, 0])
