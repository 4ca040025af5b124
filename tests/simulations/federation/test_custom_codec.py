"""An installed package's codec in a simulation: its faults end the run by name, and a resumed run has the same one."""

import sys

import numpy as np
import pytest

from atoll.protocol.settings import ConfigError
from atoll.server.errors import StoreCorrupted
from atoll.simulations.federation.updates import Updates
from atoll.task.errors import TaskBroken
from atoll.tensors.codecs import installed
from atoll.tensors.codecs.names import parse_codec
from atoll.training.worker.model_files import write_update
from tests.plugins.packages import CODEC, install
from tests.simulations.federation.simulating import simulate

MOODY = '''
class Tired(Rounded):
    """Rounded, until it meets a value that no check has."""

    def decode(self, data, n):
        if n == 24:
            raise RuntimeError("too tired for a matrix")
        return super().decode(data, n)


class Unable(Rounded):
    def encode(self, values, rng):
        if len(values) == 24:
            raise RuntimeError("no idea")
        return super().encode(values, rng)
'''
MODULE = "acme_codecs_simulated"
TWO = ("rounds=2", "round.cohort_size=2")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """The module's file; call it to forget all that this process has loaded."""
    points = {"atoll.codecs": {name: f"{MODULE}:{name.title()}" for name in ("rounded", "tired", "unable")}}
    folder = install(tmp_path / "site", "acme-codecs", modules={MODULE: CODEC + MOODY}, points=points)
    monkeypatch.syspath_prepend(folder)

    def forget(source=None):
        if source is not None:
            (folder / f"{MODULE}.py").write_text(source)
        for name in ("_BY_SETTING", "_OPENED", "_LOADED"):
            monkeypatch.setattr(installed, name, {})
        parse_codec.cache_clear()
        sys.modules.pop(MODULE, None)

    forget()
    return forget


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tired", r"client \w: the update cannot be encoded: tired@1.2-.* refuses what it has written: .*too tired"),
        ("unable", r"client \w: the update cannot be encoded: unable@1.2-.*: encode raised RuntimeError: no idea"),
    ],
)
def test_a_codec_that_breaks_ends_the_simulation_by_name(tmp_path, name, told):
    with pytest.raises(TaskBroken, match=told):
        simulate(tmp_path / "run", f"aggregation.codec={name}", *TWO)


def test_values_beyond_a_codec_s_range_are_a_failed_training_as_deployed(tmp_path):
    result, found = simulate(tmp_path, "aggregation.codec=fp16", "local.lr=1e6", "round.retry=1", *TWO)
    assert result["state"] == "failed"
    assert [line["why"] for line in found] == ["quorum_out_of_reach"] * 2


def test_an_update_that_waits_is_decoded_by_the_version_that_has_written_it(tmp_path, fresh):
    codec = installed.open_for("rounded", {"levels": 5}).name
    held, digest = Updates(tmp_path / "updates", None), "0" * 64
    values = np.arange(12, dtype=np.float32)
    pieces = write_update(tmp_path / "file", {"w": values}, codec=codec, seed=1, buffers=())
    held.add_encoded(digest, tmp_path / "file", pieces, {})
    kept = held.write([digest])
    fresh()
    assert np.abs(Updates(tmp_path / "updates", None, kept).arrays(digest)["w"] - values).max() <= 1.1 + 1e-5
    fresh(CODEC + "\nLATER = 1\n")
    with pytest.raises(StoreCorrupted, match=r"needs cannot be decoded: rounded@1.2-.* is required, and rounded@1.2-"):
        Updates(tmp_path / "updates", None, kept)


@pytest.mark.usefixtures("fresh")
def test_all_faults_of_own_code_are_told_at_once(tmp_path):
    given = ("aggregation.codec=rounded", "aggregation.codec_options.levels=0", "aggregation.rule=math:pi")
    with pytest.raises(ConfigError) as refused:
        simulate(tmp_path / "run", *given, *TWO)
    assert len(refused.value.faults) == 2
