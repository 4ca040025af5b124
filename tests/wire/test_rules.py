"""A robust rule in a real coordinator: one site that sends nonsense does not move the model."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.protocol.manifest import UpdateManifest
from atoll.server.errors import OperatorError
from atoll.tensors.layout import Piece, pieces_in_order
from atoll.tensors.safetensors_file import read
from tests.simulations.federation import rows_task
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running, update_of
from tests.wire.test_round import committed, live, report

NAMES = ("a", "b", "c", "d", "e")
FIVE = {"rounds": 2, "round__cohort_size": 5, "round__min_available": 5}


async def rounds(tmp_path, num_rounds, **rules):
    """Four honest sites send ones, the fifth a million; returns the models."""
    async with running(tmp_path / "state", **FIVE, **rules) as it:
        clients = [it.client(name) for name in NAMES]
        opened = [await client.__aenter__() for client in clients]
        try:
            for number in range(num_rounds):
                values = [1.0, 1.0, 1.0, 1.0, 1e6]
                answers = await asyncio.gather(*map(report, opened, values))
                assert all(verdict.accepted for _, verdict in answers)
                await committed(it, number + 1)
        finally:
            for client in clients:
                await client.__aexit__(None, None, None)
        store = it.run.reducer.store
        return [read(store.version_path(number))["w"].tolist() for number in range(1, num_rounds + 1)]


@pytest.mark.parametrize(
    ("rules", "moved"),
    [
        ({"aggregation__rule": "mean"}, 200_000.8),
        ({"aggregation__rule": "median"}, 1.0),
        ({"aggregation__rule": "trimmed_mean", "aggregation__malicious": 1}, 1.0),
        ({"aggregation__rule": "multi_krum", "aggregation__malicious": 1}, 1.0),
        ({"aggregation__norm_bound": "median"}, 1.0),
    ],
)
@live
async def test_one_site_s_nonsense_moves_the_mean_and_no_robust_rule(tmp_path, rules, moved):
    [model] = await rounds(tmp_path, 1, **rules)
    assert model == pytest.approx([moved] * 4, rel=1e-5)


@live
async def test_centred_clipping_goes_on_from_its_last_aggregate(tmp_path):
    rule = {"aggregation__rule": "centered_clipping", "aggregation__radius": 2.0}
    first, second = await rounds(tmp_path, 2, **rule)
    # each of four ones, of length 2, counts in full; the fifth moves by 2 along (1, 1, 1, 1) / 2
    assert first == pytest.approx([(4 * 1 + 1) / 5] * 4)
    assert second == pytest.approx([1 + 1 + (4 * 0 + 1) / 5] * 4)


REDUCE = "def reduce(self, rows):\n        return rows.mean(0)\n"


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        ("def reduce(self, rows):\n        return {}['no key']\n", "reduce raised KeyError: 'no key'"),
        ("def reduce(self, rows):\n        raise SystemExit(3)\n", "reduce raised SystemExit: 3"),
        (
            f"{REDUCE}    def check(self, num_updates):\n        return {{}}['no key']\n",
            "check raised KeyError: 'no key'",
        ),
        (f"{REDUCE}    def mixing(self, gram):\n        return {{}}\n", "mixing raised TypeError: "),
    ],
    ids=["reduce", "exit", "check", "mixing"],
)
@live
async def test_a_custom_rule_that_fails_costs_its_rounds_and_not_the_coordinator(tmp_path, methods, told):
    rule = tmp_path / "mine.py"
    rule.write_text(f"class Mine:\n    {methods}\nmine = Mine()\n")
    settings = {"round__cohort_size": 1, "round__retry": 1, "aggregation__rule": f"{rule}:mine"}
    async with running(tmp_path / "state", **settings) as it, it.client("a") as client:
        for _ in range(2):
            _, verdict = await report(client, 1.0)
            assert verdict.accepted
        async with asyncio.timeout(BOUND_S):
            await it.run.ended.wait()
        assert not it.coordinator.crashed.done()
        records = list(it.run.machine.ledger.past.values())
        assert [record.abandon_reason for record in records] == ["aggregation_failed"] * 2
        assert records[0].detail.startswith(f"RuleFailed: rule Mine: {told}")


def part_of(invite, client, version, names, value):
    """An update that has some of the model's tensors alone."""
    manifest, _ = update_of(invite, client.name, version, value=value)
    pieces = tuple(piece for piece in manifest.pieces if piece.tensor in names)
    data = b"".join(np.full(piece.lengths, value, np.float32).tobytes() for piece in pieces)
    return replace(manifest, pieces=pieces), data


@live
async def test_a_tensor_is_averaged_over_the_updates_that_have_it(tmp_path):
    settings = {"round__cohort_size": 2, "round__min_available": 2, "rounds": 1, "aggregation__partial": True}
    async with running(tmp_path / "state", **settings) as it, it.client("a") as a, it.client("b") as b:
        await report(a, 4.0)
        invite = await b.next("invite")
        version, _, _ = await b.download(invite)
        assert (await b.upload(*part_of(invite, b, version, {"w"}, 2.0))).accepted
        await committed(it, 1)
        model = read(it.run.reducer.version(1).path)
        assert model["w"].tolist() == [3.0] * 4
        assert model["count"] == 4


@pytest.mark.parametrize("partial", [False, True])
@live
async def test_an_update_without_what_the_run_wants_of_it_is_refused_before_its_bytes(tmp_path, partial):
    async with (
        running(tmp_path / "state", round__cohort_size=1, aggregation__partial=partial) as it,
        it.client("a") as a,
    ):
        invite = await a.next("invite")
        version, _, _ = await a.download(invite)
        names = set() if partial else {version.pieces[0].tensor}
        verdict = await a.upload(*part_of(invite, a, version, names, 1.0))
        assert (verdict.accepted, verdict.reason) == (False, "wrong_layout")


ROWS = str(Path(rows_task.__file__)) + ":task"
GROWS = {"task": ROWS, "aggregation__rule": "concatenate", "aggregation__append_max": 90, "rounds": 2}


def rows_of(invite, client, count, **kinds):
    """An update that appends some rows; `kinds`: other dtypes or lengths."""
    arrays = {
        "what": np.full((count, kinds.get("width", 2)), 7.0, np.float32),
        "who": np.full(count, ord(client.name), kinds.get("dtype", np.uint8)),
    }
    dtypes = {np.dtype(np.float32): "F32", np.dtype(np.uint8): "U8", np.dtype(np.int16): "I16"}
    pieces = pieces_in_order(
        Piece(name, dtypes[a.dtype], (0,) * a.ndim, a.shape, hashlib.sha256(a.tobytes()).hexdigest())
        for name, a in arrays.items()
        if name not in kinds.get("without", ())
    )
    manifest = UpdateManifest(
        *(invite.run_id, invite.round_id, client.name, invite.base_version, invite.model_digest, 10, 1.0), pieces
    )
    return manifest, b"".join(arrays[piece.tensor].tobytes() for piece in pieces)


KNOWS = {"tasks": ("rows_task:task",)}


@live
async def test_rows_are_appended_in_the_order_of_the_names(tmp_path):
    settings = {**GROWS, "round__cohort_size": 2, "round__min_available": 2}
    async with (
        running(tmp_path / "state", **settings) as it,
        it.client("b", **KNOWS) as b,
        it.client("a", **KNOWS) as a,
    ):
        for number, counts in enumerate(({b: 3, a: 10}, {b: 1, a: 0}), start=1):
            for client, count in counts.items():
                invite = await client.next("invite")
                assert invite.algorithm == "concatenate"
                version, _, _ = await client.download(invite)
                assert version.layout == it.run.reducer.version(number - 1).manifest.layout
                assert (await client.upload(*rows_of(invite, client, count))).accepted
            await committed(it, number)
        who = [read(it.run.reducer.version(number).path)["who"].tolist() for number in (1, 2)]
        assert who == [[ord("a")] * 10 + [ord("b")] * 3, [ord("a")] * 10 + [ord("b")] * 4]


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"count": 11}, "would append 99 bytes; allowed by aggregation.append_max: 90"),
        ({"count": 2, "width": 3}, "of tensor 'what' is not inside the shape (2, 2)"),
        ({"count": 2, "dtype": np.int16}, "tensor 'who' has dtype 'I16', allowed: U8"),
        ({"count": 2, "without": ["who"]}, "tensor 'who' is missing"),
    ],
)
@live
async def test_what_cannot_be_appended_is_refused_before_its_bytes(tmp_path, wrong, fault):
    async with running(tmp_path / "state", **GROWS, round__cohort_size=1) as it, it.client("a", **KNOWS) as client:
        verdict = await client.upload(*rows_of(await client.next("invite"), client, **wrong))
        assert (verdict.accepted, verdict.reason) == (False, "wrong_layout")
        assert fault in verdict.detail


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"coordinator__aggregators": 1}, "allowed: a coordinator without --aggregators"),
        ({"coordinator__incoming_max": 80}, "an update may append aggregation.append_max = 90 bytes"),
    ],
)
@live
async def test_a_coordinator_that_cannot_make_a_model_grow_says_so_before_the_run_begins(tmp_path, settings, fault):
    with pytest.raises(OperatorError, match=fault):
        async with running(tmp_path / "state", **GROWS, **settings):
            pass
