"""Secure sums from the members' sessions to the next version: at the coordinator, and at ranks with the same digest."""

import hashlib
import logging
import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from atoll.aggregation.masked.fold import Outcome
from atoll.aggregation.masked.no_sum import NoSum
from atoll.protocol.manifest import VersionManifest, digest_of
from atoll.protocol.vocabulary import Version
from atoll.server.config.secure import SecureConfig
from atoll.server.files.versions import version_file
from atoll.server.folding.plan import FoldPlan
from atoll.server.folding.sums import expected_layout, faults_of_words
from atoll.server.journal.codec import StoredUpdateMeta, decode, encode, encode_meta
from atoll.server.ranks.rank import RankPlace, _Fold
from atoll.server.ranks.rank_store import RankRun
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, in_order
from atoll.tensors.ownership import owned_pieces
from tests.aggregation.masked.test_fold import base_of
from tests.aggregation.ranks import on_ranks, write_shards
from tests.server.folding.secure_rounds import FLOATS, MASKED, RULES, RUN, reducer_of, secure_round
from tests.tensors.masked.members import LAYOUT

BASE = base_of(LAYOUT)


def plain_mean(run, name):
    """Return the mean of the members' clipped updates, by float64."""
    total, weight = 0.0, 0.0
    for client, update in run.updates.items():
        norm = np.sqrt(sum(float((update[each].astype(np.float64) ** 2).sum()) for each in FLOATS))
        number = run.examples[client]
        total, weight = total + number * min(1.0, 1.0 / norm) * update[name].astype(np.float64), weight + number
    return total / weight


def test_the_coordinator_folds_the_sums_of_its_sessions_and_keeps_no_key(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    run = secure_round(tmp_path)
    assert len(run.effect.contributions) == 6
    reducer = reducer_of(tmp_path / "run", run, BASE)
    folded = reducer._fold_sums(run.effect)
    assert (folded.dropped, folded.members, folded.ranges) == ({}, 6, (0,) * 4)
    assert folded.statistics == {"loss": (12.0, 120.0)}
    assert folded.weight == pytest.approx(sum(run.examples.values()) / 100)
    new = safetensors_file.read(reducer.store.version_path(Version(1)))
    for name in FLOATS:
        assert np.abs(new[name] - (BASE[name] + plain_mean(run, name))).max(initial=0) <= 1e-5
    assert reducer.version(Version(1)).digest == folded.digest
    plan = reducer._plan(run.effect, {c.digest: run.row(c.digest) for c in run.effect.contributions})[0]
    assert FoldPlan.decode(plan.encode()) == plan
    keys = [key for session in plan.sums.sessions for key, _ in session.streams]
    assert len(keys) == 3 + 3 + 3  # 3 survivors, 3 pads of the lost one with them; 3 survivors
    told = repr(plan) + caplog.text + repr(folded)
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    for key in keys:
        assert key not in told
        assert key.encode() not in written
        assert bytes.fromhex(key) not in written


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_make_the_version_of_the_coordinator(tmp_path, size, num_parts):
    run, draw = secure_round(tmp_path, num_parts=num_parts), random.Random(size)
    whole = run.in_one_file_each()
    reducer = reducer_of(tmp_path / "run", whole, BASE)
    expected = reducer._fold_sums(whole.effect)
    base = reducer.version(Version(0))
    places = {digest: tuple(draw.randrange(size) for _ in range(num_parts)) for digest in run.manifests}
    metas = {digest: run.meta(digest, held) for digest, held in places.items()}
    rows = {digest: SimpleNamespace(meta=encode_meta(meta), data=None) for digest, meta in metas.items()}
    plan = FoldPlan.decode(reducer._plan(run.effect, rows)[0].encode())
    runs = ranks_of(tmp_path, size, run, places)
    first = reducer.store.version_path(Version(0))
    write_shards(first, in_order(LAYOUT), size, lambda rank: runs[rank].store.version_path(Version(0)))

    def work(exchange):
        rank = exchange.rank
        owned = owned_pieces(base.manifest.pieces, rank, size)
        version = version_file(runs[rank].store, Version(0), base.manifest_bytes, owned)
        fold = _Fold(RankPlace(rank, size, "lo"), runs[rank], plan, version, metas, None, SimpleNamespace(is_set=bool))
        fold._exchange = lambda: nullcontext(exchange)
        return fold()

    results = on_ranks(size, work)
    pieces = tuple(piece for folded, _, _ in results for piece in folded.pieces)
    outcomes = [decode(Outcome, encode(outcome), where="the test") for _, _, outcome in results]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert (outcomes[0].members, outcomes[0].statistics) == (6, {"loss": (12.0, 120.0)})
    manifest = VersionManifest.of(pieces, model_dtypes=base.manifest.model_dtypes)
    assert digest_of(manifest.encode()) == expected.digest


def ranks_of(folder, size, run, places):
    """Return the stores of ranks, with each update or part where it lies."""
    runs = []
    for rank in range(size):
        (folder / f"r{rank}").mkdir()
        runs.append(RankRun(folder / f"r{rank}", RUN, rank, size))
    for digest, held in places.items():
        if not run.parts[digest]:
            runs[held[0]].store.update_path(digest).write_bytes(run.data[digest])
        for index, (part, data) in enumerate(run.parts[digest]):
            store = runs[held[index]].store
            bytes_at, findings_at = store.parts_of(run.manifests[digest], digest).paths(store._updates, index)
            bytes_at.write_bytes(data)
            findings_at.write_text(encode_meta(StoredUpdateMeta(part.encode(), {}, {})))
    return runs


def test_a_session_with_a_wrong_canary_is_dropped_and_without_another_there_is_no_version(tmp_path):
    run = secure_round(tmp_path)
    victim = next(digest for digest, manifest in run.manifests.items() if manifest.client_id.startswith("s1"))
    raw, pieces = bytearray(run.data[victim]), run.manifests[victim].pieces
    raw[0] ^= 1
    assert pieces[0].tensor == "secure/exact"
    wrong = replace(pieces[0], sha256=hashlib.sha256(raw[: pieces[0].num_bytes]).hexdigest())
    new = run.add(run.manifests[victim].client_id, (wrong, *pieces[1:]), bytes(raw))
    effect = run.with_update(victim, new)
    reducer = reducer_of(tmp_path / "run", run, BASE)
    folded = reducer._fold_sums(effect)
    assert (folded.dropped.keys(), folded.members) == ({1}, 3)
    with pytest.raises(NoSum, match="session 1: its canaries"):
        reducer._fold_sums(replace(effect, sums=effect.sums[1:]))


def test_a_sum_of_an_absent_update_or_of_wrong_reveals_is_no_plan(tmp_path):
    run = secure_round(tmp_path)
    rows = {digest: run.row(digest) for digest in run.manifests}
    reducer = reducer_of(tmp_path / "run", run, BASE)
    with pytest.raises(ValueError, match="session 0: s0-site-00 of its sum has no update"):
        reducer._plan(replace(run.effect, contributions=run.effect.contributions[1:]), rows)
    first = run.effect.sums[0]
    wrong = {place: tuple(share + 1 for share in shares) for place, shares in first.reveals.items()}
    with pytest.raises(ValueError, match="are right"):
        reducer._plan(replace(run.effect, sums=(replace(first, reveals=wrong),)), rows)


def test_an_update_must_have_the_layout_and_the_bits_of_the_sum():
    assert expected_layout(LAYOUT, None) == LAYOUT
    assert expected_layout(LAYOUT, RULES) == MASKED
    pieces = [Piece(t.name, t.dtype, (0,) * len(t.shape), t.shape, "") for t in MASKED]
    assert faults_of_words(MASKED, pieces) == []
    wider = [replace(piece, dtype="I64") for piece in pieces]
    assert faults_of_words(MASKED, wider) == [
        f"tensor {name!r} has dtype 'I64', allowed in this sum: I32" for name in FLOATS
    ]


def test_the_metrics_of_the_rules_are_the_loss_and_those_of_the_table():
    assert SecureConfig(clip_norm=1.0).rules().metrics == (("loss", 2),)
    assert SecureConfig(clip_norm=1.0, metrics={"f1": 3, "loss": 4}).rules().metrics == (("f1", 3), ("loss", 4))
    with pytest.raises(ValueError, match="101 metrics"):
        SecureConfig(clip_norm=1.0, metrics={f"m{k}": 1 for k in range(100)})
