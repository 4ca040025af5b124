"""Codecs over real gRPC: real agents and a client of bare messages against a real coordinator."""

import asyncio
import hashlib
import threading
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.client.config import AgentConfig
from atoll.client.process import run_agent
from atoll.client.work.runner import Training
from atoll.server.files.run_store import RunStore
from atoll.server.rounds.round_summary import summary
from atoll.server.views.history import History
from atoll.server.views.sentences import sentences
from atoll.task.deadline import Deadline
from atoll.tensors.layout import Piece, pieces_in_order
from atoll.tensors.safetensors_file import read
from atoll.training.worker.operations import Operations
from tests.tensors.encoded_by_hand import decoded, encoded
from tests.turns import in_turn
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running, update_of
from tests.wire.test_bad_input import refused
from tests.wire.test_round import committed, live, report

DIGITS = str(Path(__file__).parent / "tasks" / "linear_digits_task.py") + ":task"


TRAINING = threading.Lock()
"""A training seeds the generators of its process, and must be alone with them."""


class InProcess:
    """A worker's own operations, on a thread of this process: a process for each of many agents would take long."""

    def __init__(self, reference, site):
        self.operations, self.codecs = Operations(), []
        self._do("load", task=reference, site=site, threads=1)

    def _do(self, op, **request):
        with TRAINING:
            answer = self.operations.answer({"op": op, **request}, Deadline.never())
        assert "error" not in answer, answer
        return answer

    async def describe(self):
        return self._do("describe")["num_examples"]

    async def train(self, order):
        self.codecs.append(order.codec)
        request = {"model": order.model, "out": order.out, "seed": order.seed, "local": dict(order.local)}
        request |= {"codec": order.codec, "owed": order.owed, "residual": order.residual}
        request |= {"algorithm": order.algorithm, "own": order.own, "own_out": order.own_out}
        answer = await asyncio.to_thread(self._do, "train", **request)
        pieces = tuple(Piece(t, d, tuple(o), tuple(n), s, *e) for t, d, o, n, s, *e in answer["pieces"])
        return Training(
            pieces=pieces,
            num_examples=answer["num_examples"],
            work=1.0,
            statistics={},
            seconds=0.1,
            has_own=answer["has_own"],
        )

    def extend(self, budget): ...

    def stop(self): ...

    def kill(self): ...

    def run_ended(self, run_id): ...

    async def close(self): ...


@asynccontextmanager
async def agents(it, folder, sites, reference):
    """An agent in this process for each site, until the block ends; the runners by site."""
    runners = {site: InProcess(reference, site) for site in sites}
    tasks = {it.run.task: reference}
    configs = [AgentConfig(site=site, coordinator=it.address, insecure=True, state=folder / site) for site in sites]
    running_ = [
        asyncio.ensure_future(run_agent(config, tasks, runner=runners[config.site], handle_signals=False))
        for config in configs
    ]
    try:
        yield runners
    finally:
        for task in running_:
            task.cancel()
        await asyncio.wait(running_)


def accuracy(path):
    """Return the accuracy of a version of the digits on the server's own images."""
    operations = Operations()
    operations.answer({"op": "load", "task": DIGITS, "threads": 1}, Deadline.never())
    sums = operations.answer({"op": "evaluate", "model": path, "split": "server"}, Deadline.never())
    right, count = sums["statistics"]["accuracy"]
    return right / count


ROUNDS = 6
SITES = ("north", "south", "east")
WEIGHTS, BIAS = 640, 10


async def digits(folder, **settings):
    """Some rounds of the digits: the accuracy, the record of the last round, and the runners."""
    rules = {"task": DIGITS, "name": "digits", "rounds": ROUNDS, "round__cohort_size": len(SITES)}
    async with running(folder / "state", **rules, **settings) as it:
        async with agents(it, folder, SITES, DIGITS) as runners:
            async with asyncio.timeout(BOUND_S):
                await it.run.ended.wait()
        assert it.run.machine.ledger.version == ROUNDS
        return accuracy(it.run.reducer.version(ROUNDS).path), History(folder / "state").rounds("digits-1")[-1], runners


@pytest.fixture(scope="module")
def plain_accuracy(tmp_path_factory):
    return asyncio.run(digits(tmp_path_factory.mktemp("plain")))[0]


LEARNT = (
    ({"codec": "bf16"}, 2 * (WEIGHTS + BIAS), 0.02),
    ({"codec": "qsgd8"}, 8 + WEIGHTS + 4 + BIAS, 0.02),
    ({"codec": "fp16"}, 2 * (WEIGHTS + BIAS), 0.02),
    ({"codec": "sign"}, 4 + WEIGHTS // 8 + 4 + 2, 0.08),
    ({"codec": "topk", "topk_fraction": 0.1}, 6 * (WEIGHTS // 10 + 1), 0.08),
)
"""Codecs, the bytes of an update, and the accuracy that they may cost."""


@pytest.mark.parametrize(
    ("codec", "sent", "loss"),
    [in_turn(*values, number=n, days=2, id=values[0]["codec"]) for n, values in enumerate(LEARNT)],
)
def test_digits_are_learnt_with_each_codec_and_the_record_says_what_it_saved(
    tmp_path, codec, sent, loss, plain_accuracy
):
    settings = {f"aggregation__{key}": value for key, value in codec.items()}
    reached, record, runners = asyncio.run(digits(tmp_path, **settings))
    assert plain_accuracy > 0.75
    assert reached >= plain_accuracy - loss
    name = "topk:0.1" if codec["codec"] == "topk" else codec["codec"]
    assert {codec for runner in runners.values() for codec in runner.codecs} == {name}
    plain = 4 * (WEIGHTS + BIAS)
    assert {(client.num_bytes, client.plain_bytes) for client in record.clients.values()} == {(sent, plain)}
    assert summary(record)["bytes_saved"] == len(SITES) * (plain - sent)
    [saved] = [sentence for sentence in sentences(record) if sentence.startswith("The codec saved")]
    share = f"{100 * (plain - sent) / plain:.3g} %"
    assert saved == f"The codec saved {len(SITES) * (plain - sent) / 1e3:.1f} kB of 7.8 kB ({share})."
    assert not list(tmp_path.glob("*/kept/*")), "the run is finished: nothing is owed to it"


def test_control_variates_travel_plain_and_stay_the_mean_of_the_clients_own(tmp_path):
    """SCAFFOLD: of an update with one bit per element, c is what it would be without a codec."""
    scaffold = {"aggregation__algorithm": "scaffold", "aggregation__num_clients": len(SITES)}
    reached, record, _ = asyncio.run(digits(tmp_path, aggregation__codec="sign", **scaffold))
    assert reached > 0.6
    sent = 4 + WEIGHTS // 8 + 4 + 2 + 4 * (WEIGHTS + BIAS)
    assert {client.num_bytes for client in record.clients.values()} == {sent}
    version = read(RunStore(tmp_path / "state" / "runs" / "digits-1").version_path(ROUNDS))
    own = [read(next((tmp_path / site / "personal").glob(f"digits-1.{ROUNDS}.*.safetensors"))) for site in SITES]
    variates = [name for name in version if name.startswith("control/")]
    assert len(variates) == 2
    for name in variates:
        assert np.abs(version[name]).max() > 1e-3
        np.testing.assert_allclose(version[name], sum(kept[name] for kept in own) / len(SITES), atol=1e-6)


@live
async def test_an_old_agents_plain_update_counts_beside_an_encoded_one(tmp_path):
    async with running(tmp_path / "state", rounds=1, aggregation__codec="bf16") as it:
        async with it.client("a", codecs=["bf16", "zip"]) as a, it.client("b") as b:
            invite, old = await a.next("invite"), await b.next("invite")
            assert (invite.codec, old.codec) == ("bf16", "")
            version, _, _ = await a.download(invite)
            manifest, data = encoded_update(invite, "a", version, np.full(4, 1.001, np.float32), "bf16")
            assert (await a.upload(manifest, b"", data=data)).accepted, "a small one rides with its manifest"
            assert (await b.upload(*update_of(old, "b", version, value=3.0))).accepted
            await committed(it, 1)
            rounded = decoded("bf16", encoded("bf16", np.full(4, 1.001, np.float32)), 4)
            model = read(it.run.reducer.version(1).path)["w"]
            np.testing.assert_array_equal(model, ((rounded.astype(np.float64) + 3.0) / 2).astype(np.float32))
            record = it.run.machine.ledger.past[1]
            assert (record.clients["a"].num_bytes, record.clients["a"].plain_bytes) == (16, 24)
            assert (record.clients["b"].num_bytes, record.clients["b"].plain_bytes) == (24, 24)


def encoded_update(invite, client, version, values, codec, *, spoil=lambda data: data):
    """An update whose tensor `w` is encoded."""
    pieces, raws = [], {}
    for piece in version.pieces:
        raw = np.zeros(piece.lengths, np.int64).tobytes()
        if piece.tensor == "w":
            raw = spoil(encoded(codec, values))
            piece = replace(piece, codec=codec, encoded_bytes=len(raw))
        raws[piece.tensor] = raw
        pieces.append(replace(piece, sha256=hashlib.sha256(raw).hexdigest()))
    ordered = pieces_in_order(pieces)
    plain, _ = update_of(invite, client, version)
    return replace(plain, pieces=ordered), b"".join(raws[piece.tensor] for piece in ordered)


ONES = np.ones(4, np.float32)


@pytest.mark.parametrize(("run_codec", "allowed"), [("none", ""), ("bf16", "bf16, or ")])
def test_codec_that_the_run_does_not_use_is_refused_before_a_byte(tmp_path, run_codec, allowed):
    @live
    async def check(tmp_path):
        def make(invite, version):
            manifest, _ = encoded_update(invite, "a", version, ONES, "sign")
            return manifest, b""  # if the bytes were asked for, the upload would break

        verdict, client = await refused(tmp_path, make, aggregation__codec=run_codec)
        assert verdict.reason == client.reason == "wrong_codec"
        assert verdict.detail == f"the update is encoded with sign; allowed: {allowed}plain values"

    check(tmp_path)


BAD = [
    ("sign", {}, lambda raw: b"\x00\x00\xc0\x7f" + raw[4:], "w: sign: a scale is not in"),
    ("sign", {}, lambda raw: raw[:-1] + b"\xf0", "w: sign: padding behind element 3 is not 0"),
    ("topk:0.5", {"topk_fraction": 0.5}, lambda raw: raw[:-4] + b"\1\0\0\0", "indices are not strictly ascending"),
    ("topk:0.5", {"topk_fraction": 0.5}, lambda raw: raw[:-2] + b"\4\0", "indices are not strictly ascending in 0..3"),
    ("bf16", {}, lambda raw: b"\x80\x7f" + raw[2:], "w: bf16: a value is not finite"),
    ("qsgd8", {}, lambda raw: raw[:-1] + b"\x80", "w: qsgd8: level -128 is not in -127..127"),
]


@pytest.mark.parametrize(("codec", "options", "spoil", "fault"), BAD, ids=[f"{c} {f[-12:]}" for c, _, _, f in BAD])
def test_bytes_that_no_encoder_writes_are_refused_by_tensor(tmp_path, codec, options, spoil, fault):
    @live
    async def check(tmp_path):
        settings = {"aggregation__codec": codec.partition(":")[0]} | {
            f"aggregation__{k}": v for k, v in options.items()
        }

        def make(invite, version):
            return encoded_update(invite, "a", version, ONES, codec, spoil=spoil)

        verdict, client = await refused(tmp_path, make, **settings)
        assert verdict.reason == client.reason == "bad_encoding"
        assert fault in verdict.detail
        assert not verdict.resend

    check(tmp_path)


@live
async def test_encoded_bytes_that_were_damaged_on_the_way_are_asked_for_again(tmp_path):
    async with running(tmp_path / "state", aggregation__codec="sign") as it, it.client("a") as a, it.client("b"):
        invite = await a.next("invite")
        version, _, _ = await a.download(invite)
        manifest, data = encoded_update(invite, "a", version, ONES, "sign")
        verdict = await a.upload(manifest, bytes([data[0]]) + b"\xff" * (len(data) - 1))
        assert (verdict.reason, verdict.resend) == ("digest_mismatch", True)
        assert (await a.upload(manifest, data)).accepted
        assert (await a.upload(manifest, b"")).accepted, "and again without its bytes"


@pytest.mark.parametrize("rule", ["median", "geometric_median"])
@live
async def test_robust_rules_read_encoded_updates(tmp_path, rule):
    names = ("a", "b", "c")
    rules = {"rounds": 1, "round__cohort_size": 3, "aggregation__rule": rule, "aggregation__codec": "qsgd8"}
    async with running(tmp_path / "state", **rules) as it, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(it.client(name, codecs=["qsgd8"])) for name in names]
        for client, value in zip(clients, [1.0, 1.0, 500.0], strict=True):
            invite = await client.next("invite")
            version, _, _ = await client.download(invite)
            update = encoded_update(invite, client.name, version, np.full(4, value, np.float32), "qsgd8")
            assert (await client.upload(*update)).accepted
        await committed(it, 1)
        np.testing.assert_allclose(read(it.run.reducer.version(1).path)["w"], 1.0, atol=0.05)


@live
async def test_large_encoded_update_survives_a_restart_of_the_coordinator(tmp_path, monkeypatch):
    from atoll.server.files import incoming

    monkeypatch.setattr(incoming, "SMALL_BYTES", 0)
    settings = {"rounds": 1, "aggregation__codec": "bf16"}
    async with running(tmp_path / "state", **settings) as it, it.client("a", codecs=["bf16"]) as a, it.client("b"):
        invite = await a.next("invite")
        version, _, _ = await a.download(invite)
        assert (await a.upload(*encoded_update(invite, "a", version, 5 * ONES, "bf16"))).accepted
    async with running(tmp_path / "state", **settings) as it, it.client("b") as b:
        assert (await report(b, 1.0))[1].accepted
        await committed(it, 1)
        assert read(it.run.reducer.version(1).path)["w"].tolist() == [3.0] * 4
