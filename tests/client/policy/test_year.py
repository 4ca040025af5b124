"""A year of hourly rounds at a site, by the functions that an agent calls for each of them."""

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from atoll.client.disk.seen_store import Memory
from atoll.client.disk.spool import Spool
from atoll.client.policy.gate import Gate
from atoll.client.policy.history import ROUNDS_DAYS, PolicyHistory
from atoll.client.session.rollback_rules import Seen
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, Version
from atoll.tensors.safetensors_file import write
from tests.client.policy.test_gate import POLICY, RUN, invitation, version

HOURS = 24 * 365
BOUND_BYTES = 50 * 10**6
LOG_BYTES = 390
"""Bytes of the agent's log for each round, as measured in a federation; the operator's means rotate that file."""


@pytest.mark.long
def test_a_year_of_hourly_rounds_stays_under_50_mb_without_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _: None)  # durability is no part of the size
    policy, state, now = tmp_path / "policy.toml", tmp_path / "state", 1_777_896_000.0
    policy.write_text(POLICY)
    (state / "spool").mkdir(parents=True)
    gate = Gate(policy, state, lambda: now)
    gate._history.database.execute("PRAGMA synchronous = OFF")
    memory, spool, model = Memory(state / "seen"), Spool(state / "spool", 2**30), version()
    for number in range(1, HOURS + 1):
        now += 3600.0
        memory.note(RUN, Seen(number, RoundId(number), Version(number), Version(number), Digest("a" * 64)))
        gate.note_checkpoint(f"{7 * number}:{'c' * 64}")
        asked = invitation(number)
        assert gate.ask(asked).is_allowed
        assert gate.admit(asked, model).is_allowed
        memory.save()
        pieces = write(tmp_path / "u", {"w": np.ones(10, np.float32)})
        given = {"num_examples": 1, "work": 1.0, "pieces": pieces}
        manifest = UpdateManifest(RUN, RoundId(number), ClientId("north"), Version(0), Digest("0" * 64), **given)
        entry = spool.add(tmp_path / "u", manifest, statistics={})
        assert gate.ask_upload(entry).is_allowed
        spool.discard(asked.key)
        gate.poll()
    gate.close()
    found = {path.relative_to(state): path.stat().st_size for path in state.rglob("*") if path.is_file()}
    assert sum(found.values()) + HOURS * LOG_BYTES < BOUND_BYTES, found
    assert found[Path("seen")] < 250_000
    assert found[Path("policy.db")] < 1_000_000
    with closing(PolicyHistory(state)) as kept:
        (rows,) = kept.database.execute("SELECT count(*) FROM rounds").fetchone()
    assert 24 * ROUNDS_DAYS <= rows <= 24 * (ROUNDS_DAYS + 2)
    assert rows < HOURS
