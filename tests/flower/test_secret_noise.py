"""The noise of Flower's mods and wrappers: from a secret, whatever the app seeds; simulated, as in Flower."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: `make setup` installs it")

import flwr
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.serverapp import strategy as flower

from atoll.flower.app import FlowerApp
from atoll.flower.bench import ClientBench
from atoll.flower.records import from_content, to_content
from atoll.flower.secret_noise import DRAWING, flower_noise
from atoll.ground.noise.generator import SecretGenerator

SOURCE = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
app = ClientApp(mods=[LocalDpMod(1.0, 1.0, 1.0, 1e-5)])

@app.train()
def train(message, context):
    drawn = [np.random.normal(), context.secret_rng.normal()]
    np.random.seed(42)
    moved = ArrayRecord({"w": Array(message.content["arrays"]["w"].numpy() + 0.25)})
    content = RecordDict({"a": moved, "m": MetricRecord({"num-examples": 1, "drawn": drawn})})
    return Message(content, reply_to=message)
"""
KEYS = bytes(32).hex(), bytes([1] * 32).hex()
ELSEWHERE = {"quantization", "secaggplus_utils", "recorddict", "arrayrecord", "array"}
"""Modules of Flower that draw no noise that hides: rounding, masks of a seed that is an argument, examples in texts."""


@pytest.fixture
def bench(tmp_path):
    (tmp_path / "noisy_client.py").write_text(SOURCE)
    app = FlowerApp(tmp_path, "tests", "noisy", "1.0.0", "", "noisy_client:app", {})
    yield ClientBench(app, {"site": "north"})
    sys.path.remove(str(tmp_path))
    del sys.modules["noisy_client"]


def asked(bench, key="", seed=7):
    """Return the noise in the reply to a message, and what the app drew itself."""
    content = to_content(RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros(5))})}))
    request = {"op": "message", "kind": "train", "group": "", "seed": seed, "noise": key}
    answer = bench.message(content, None, request)
    reply = from_content(answer.content)
    return reply["a"]["w"].numpy() - 0.25, list(reply["m"]["drawn"])


def test_a_local_mod_draws_from_the_key_of_its_job(bench) -> None:
    (noise, drawn), (again, drawn_again), (other, drawn_other) = (asked(bench, KEYS[n]) for n in (0, 0, 1))
    assert np.array_equal(noise, again), "after a kill"
    assert drawn == drawn_again
    assert np.abs(noise - other).min() > 1e-9
    assert not {*drawn} & {*drawn_other}, "the seeds of an app with such a mod are secret, too"
    assert np.array_equal(noise, asked(bench, KEYS[0], seed=8)[0])
    np.random.seed(42)
    assert np.abs(noise - np.random.normal(0, np.sqrt(2 * np.log(1.25e5)), 5)).min() > 1e-9, "nor of the app's seed"


def test_a_simulation_draws_as_flower_does_and_says_so(bench, monkeypatch) -> None:
    said = []
    monkeypatch.setattr("atoll.task.noise.Noise.on_public", staticmethod(lambda: said.append("public")))
    noise, _ = asked(bench)
    np.random.seed(42)
    assert noise == pytest.approx(np.random.normal(0, np.sqrt(2 * np.log(1.25e5)), 5), rel=1e-12)
    assert said


def test_a_wrapper_at_the_server_draws_from_the_secret() -> None:
    found = []
    for key in (bytes(32), bytes(32), bytes([1] * 32)):
        generator = SecretGenerator(key)
        flower_noise().begin(lambda generator=generator: generator, 0)
        wrapper = flower.DifferentialPrivacyServerSideAdaptiveClipping(flower.FedAvg(), 0.1, 2)
        np.random.seed(0)
        arrays = wrapper._add_noise_to_aggregated_arrays(ArrayRecord({"w": Array(np.zeros(5))}))
        found.append([*arrays["w"].numpy(), wrapper._noisy_fraction(1, 2)])
    assert found[0] == found[1]
    assert not {*found[0]} & {*found[2]}
    np.random.seed(0)
    public = np.random.normal(0, 1.0, 6)
    assert min(abs(one / other - 1) for one in found[0] for other in public) > 1e-9
    flower_noise().begin(None, 0)


def test_no_other_module_of_flower_draws_noise() -> None:
    """A version of Flower that draws elsewhere is noticed here."""
    folder = Path(flwr.__file__).parent
    drawing = [file for file in folder.rglob("*.py") if re.search(r"np\.random\.\w+\(", file.read_text())]
    names = {f"flwr.{'.'.join(file.relative_to(folder).with_suffix('').parts)}": file.stem for file in drawing}
    assert {stem for name, stem in names.items() if not DRAWING.fullmatch(name)} <= ELSEWHERE
    assert "flwr.serverapp.strategy.dp_adaptive_clipping" in names
