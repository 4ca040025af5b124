"""Simulated secure runs whose sites fall asleep at random instants."""

import random

from atoll.operations.load import load_user_task
from atoll.protocol.vocabulary import RoundId
from atoll.simulations.federation.run import opened
from tests.simulations.federation.simulating import TASK, settings

DUTIES = ("keys_at", "shares_at", "masked_at", "signed_at", "revealed_at")
SECURE = ("secure.clip_norm=0.5", "secure.examples_max=8", "secure.stage_timeout=6")
SITES = ("population.kind=iid", "round.deadline=60", "round.failure_rest=0")


def trace_of(folder, seed, *, clients, until=400.0, naps=1 / 30):
    """Write the intervals in which each client is awake, apart from naps of some seconds."""
    draw, lines = random.Random(seed), ["client,from_s,to_s"]
    for number in range(clients):
        at = 0.0
        while at < until:
            awake = draw.expovariate(naps)
            lines.append(f"c{number:04d},{at:.3f},{at + awake:.3f}")
            at += awake + draw.choice([0.5, 3.0, 20.0])
    path = folder / "awake.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(folder, way, *overrides, task=TASK):
    """Run; return the result, the digest of each version, and the records of the rounds."""
    file = settings(f"simulation.secure={way}", *overrides, task=task)
    digests, records = [], []

    def note(line):
        record = federation.machine.record_of(RoundId(line["round"]))
        records.append(record)
        digests.append(str(record.model_digest))

    with opened(file, load_user_task(file.task), folder, on_round=note, is_fresh=False) as federation:
        result = federation.run()
    return result, digests, records
