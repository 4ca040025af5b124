"""An update that is encoded for a secure sum joins that sum alone, at each of its attempts."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.client.disk.spool import Spool
from atoll.client.work.secure_sums import SecureSums
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import Gone, MemberKeys
from atoll.protocol.secure.terms import Terms, ranges_digest
from atoll.protocol.vocabulary import Digest, RunId, Version
from atoll.tensors.safetensors_file import write
from tests.client.policy.test_gate import invitation
from tests.client.site.sites import sites_of
from tests.server.sessions.small_federation import privacy_of, terms_of

RUN = RunId("digits-1")
ROUND = 3


def terms(**changes: Any) -> Terms:
    given = {"round": ROUND, "run": str(RUN), "ranges": ranges_digest(()), "privacy": privacy_of().text(), "bits": 64}
    return terms_of(**{**given, **changes})


def answers(root: Path, *asked: Terms, encoded_for: Terms, restarts: bool = False) -> list[Any]:
    """Return the answers of one site to invitations into sums, in order, with an update that is encoded for one."""
    site, sent = sites_of(root, 1)[0], []
    folder = root / "encoded"
    folder.mkdir()
    pieces = write(root / "update", {"w": np.arange(3, dtype=np.int64)})
    manifest = UpdateManifest(str(RUN), ROUND, site.name, 0, "0" * 64, 1, 1.0, pieces)
    Spool(folder, 2**20).add(root / "update", manifest, statistics={}, terms=encoded_for.of_sum.hex())

    def shell() -> SecureSums:
        spool = Spool(folder, 2**20)
        stores: Any = SimpleNamespace(encoded=spool, spool=spool, models=None, work=root, noise_secret=bytes(32))
        rest: Any = {"runner": None, "send": sent.append, "spawn": asyncio.ensure_future, "on_event": print}
        return SecureSums(site.name, stores, site.security, **rest)

    async def whole() -> None:
        sums = shell()
        for of in asked:
            sums = shell() if restarts else sums
            request = invitation(ROUND, task=of.task, secure=of, local=of.local)
            base = Version(of.base)
            sums.join(replace(request, run_id=RUN, model_digest=Digest(of.model), base_version=base))
            for _ in range(20):
                await asyncio.sleep(0)

    asyncio.run(whole())
    return [wire.answer_of(message) for message in sent]


@pytest.mark.parametrize("restarts", [False, True])
def test_each_attempt_at_the_sum_is_joined(tmp_path: Path, restarts: bool) -> None:
    of = terms()
    second = replace(of, attempt=2, session=1)
    found = answers(tmp_path, of, second, encoded_for=of, restarts=restarts)
    assert [type(answer) for answer in found] == [MemberKeys, MemberKeys]


@pytest.mark.parametrize(
    ("changes", "attempt", "restarts"),
    [
        ({"privacy": ""}, 2, False),
        ({"privacy": ""}, 2, True),
        ({"privacy": ""}, 1, False),
        ({"privacy": privacy_of(noise_multiplier=0.5).text()}, 2, False),
        ({"privacy": privacy_of(honest_min=4).text()}, 2, False),
        ({"clip_norm": 1000.0}, 2, False),
        ({"members_max": 5}, 2, False),
    ],
)
def test_an_attempt_under_other_terms_is_refused(
    tmp_path: Path, changes: dict[str, Any], attempt: int, restarts: bool
) -> None:
    """A coordinator that lets an attempt fail could ask for the next one without noise."""
    of = terms()
    before = [of] if attempt == 2 else []
    found = answers(tmp_path, *before, replace(of, attempt=attempt, **changes), encoded_for=of, restarts=restarts)
    assert [type(answer) for answer in found[:-1]] == [MemberKeys] * len(before)
    assert isinstance(found[-1], Gone)
    assert "other terms than the sum that was agreed to" in found[-1].reason
