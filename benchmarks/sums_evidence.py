"""The evidence about an ended run with secure sums: models, promises, what is left in state directories, and logs.

The expected model of a round is computed here, from the updates that the task determines and the clients that the
record says are in it; nothing of Atoll's sums is used for that.
"""

import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.protocol.vocabulary import AbandonReason, Phase, RunState
from atoll.server.journal.rows import EvaluationRow
from atoll.server.rounds.record import RoundRecord
from atoll.task.array_task import Instructions
from atoll.task.randomness import training_seed
from atoll.tensors.safetensors_file import read
from benchmarks.evidence import Ledger, Promise, Verdict
from benchmarks.tasks import Noise

TOLERANCE = 2e-6
"""Largest difference of an element of a version; a value has 44 bits within ten times the norm, and is a float32."""

Arrays = dict[str, NDArray[Any]]
Trained = Callable[[str, int, Arrays], tuple[Arrays, float]]
"""(site, round, base version) -> the update that the site made, and the number of its examples."""


def judge_sums(
    end: Ledger,
    in_logs: set[Promise],
    *,
    versions: Path,
    trained: Trained,
    examples_max: int,
    states: dict[str, Path],
    logs: dict[str, str],
    evaluations: Sequence[EvaluationRow] | None = None,
) -> Verdict:
    """Check an ended run.

    Args:
        end: the ledger at the end.
        in_logs: round and client of the updates that agents' logs call accepted.
        versions: the folder with every version.
        trained: the update of a site in a round, and the number of its examples.
        examples_max: the examples of a whole weight.
        states: the agents' state directories, by site.
        logs: the logs, by process.
        evaluations: of the versions by the sites of `tasks.measured`; None: they measure nothing.
    """
    verdict = Verdict()
    if evaluations is not None:
        verdict.faults += faults_of_evaluations(evaluations, [*map(int, end.models)][1:])
    if end.state is not RunState.FINISHED:
        verdict.faults.append(f"the run is {end.state} ({end.cause})")
    for record in end.records:
        if record.phase is Phase.COMMITTED:
            verdict.is_same &= _is_the_sum(record, versions, trained, examples_max)
        elif record.abandon_reason is not AbandonReason.SECURE_FAILED:
            verdict.faults.append(f"round {record.round_id} is {record.phase}: {record.abandon_reason} {record.detail}")
    records = {record.round_id: record for record in end.records}
    for round_id, site in sorted(in_logs):
        row = records[round_id].clients[site]  # type: ignore[index]
        is_told = row.used_in == round_id or row.unused_because or row.detail or (row.sum and row.sum.left)
        if not is_told and records[round_id].phase is Phase.COMMITTED:  # type: ignore[index]
            verdict.lost.append(f"round {round_id} of {site}, accepted by its log")
    for site, state in states.items():
        verdict.twice += [f"{site}: {fault}" for fault in faults_of_promises(promises_of(state))]
        verdict.faults += [f"{site} keeps {path}" for path in left_behind(state)]
    verdict.faults += [f"the log of {name} has a traceback" for name, log in logs.items() if "Traceback" in log]
    return verdict


def _is_the_sum(record: RoundRecord, versions: Path, trained: Trained, examples_max: int) -> bool:
    """Return whether a version is its base and the mean of the updates of its clients, by their weights."""
    base, made = (_version(versions, int(v)) for v in (record.base_version, record.version_after))
    total, weights = {key: np.zeros(values.shape) for key, values in base.items()}, 0.0
    for client_id, row in record.clients.items():
        if row.used_in != record.round_id:
            continue
        update, num_examples = trained(client_id, record.round_id, base)
        weight = min(1.0, num_examples / examples_max)
        weights += weight
        for key, values in update.items():
            total[key] += weight * np.asarray(values, np.float64)
    return weights > 0 and all(
        float(np.max(np.abs(made[key] - (base[key] + total[key] / weights)))) <= TOLERANCE for key in base
    )


def faults_of_evaluations(evaluations: Sequence[EvaluationRow], versions: Sequence[int]) -> list[str]:
    """Return the versions whose metrics are no sum of as many sites, or of which there is no outcome."""
    of_clients = {int(each.version): each for each in evaluations if each.source == "clients"}
    faults = [f"version {version} has no evaluation" for version in versions if version not in of_clients]
    for version, each in sorted(of_clients.items()):
        if each.statistics is None:
            continue  # its sum was lost, which the row says
        total, count = each.statistics["loss"]
        if not (total == int(total) and int(total).bit_count() == count == each.num_clients):
            faults.append(f"the metrics of version {version} are {total:g} over {count:g}, of {each.num_clients} sites")
    return faults


def by_noise(task: Noise, seed: int, name: str) -> Trained:
    """Return the updates of a task of noise, of a run of this seed and name."""

    def trained(site: str, round_id: int, base: Arrays) -> tuple[Arrays, float]:
        done = task.train(base, _instructions(training_seed(seed, name, round_id, site)))
        return {name: np.asarray(values) for name, values in done.update.items()}, done.num_examples

    return trained


def by_moves(num_elements: int) -> Trained:
    """Return the updates of `crew_task.moves`, for a model of this many numbers."""
    os.environ["ATOLL_BENCH_ELEMENTS"] = str(num_elements)
    from benchmarks.crew_task import moved  # with torch, which the other runs do without

    def trained(site: str, round_id: int, base: Arrays) -> tuple[Arrays, float]:
        update, num_examples = moved(site)
        return {"w": update.numpy()}, num_examples

    return trained


def _instructions(seed: int) -> Instructions:
    return type("Seeded", (), {"seed": seed})()  # type: ignore[no-any-return]


def _version(versions: Path, number: int) -> Arrays:
    return read(versions / f"{number:06d}.safetensors")


def promises_of(state: Path) -> list[tuple[str, str, int, int]]:
    """Return the promises of a site in order: kind, run and purpose, round or version, attempt."""
    columns = "kind, run || ' ' || purpose, round, attempt"
    with closing(sqlite3.connect(state / "policy.db")) as database:
        rows = database.execute(f"SELECT {columns} FROM promises ORDER BY number").fetchall()
    return [(str(kind), str(run), int(round_id), int(attempt)) for kind, run, round_id, attempt in rows]


def faults_of_promises(promises: Iterable[tuple[str, str, int, int]]) -> list[str]:
    """Return the faults by which two sums could open one update: an attempt joined twice, or one after a signature."""
    faults, signed, given = [], set(), Counter[tuple[str, str, int, int]]()
    for promise in promises:
        kind, run, round_id, attempt = promise
        given[promise] += 1
        if given[promise] > 1:
            faults.append(f"{kind} twice in round {round_id}, attempt {attempt}")
        if kind == "joined" and (run, round_id) in signed:
            faults.append(f"joined attempt {attempt} of round {round_id} after a signature")
        if kind == "signed":
            signed.add((run, round_id))
    return faults


def left_behind(state: Path) -> list[Path]:
    """Return the updates in an agent's state directory: plain, encoded and masked ones; none after the end of a run."""
    folders = (state / name for name in ("spool", "encoded", "work"))
    return sorted(path.relative_to(state) for folder in folders for path in folder.rglob("*") if path.is_file())
