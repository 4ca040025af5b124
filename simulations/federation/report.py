"""The report of a simulated run in its folder: a line for each round, and the result.

    rounds.jsonl   see `line_of`
    result.json    the state, the cause, the totals
    SHA256SUMS     the digests of these and of the settings, once the run has ended (`seal`)

A metric is the task's value of the sums over all examples, never a mean of values.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from atoll.ground.durable import write_atomically
from atoll.ground.printable import conclusion, count_of, some_of
from atoll.protocol.vocabulary import ClientId, Fate, RoundId
from atoll.server.errors import StoreCorrupted
from atoll.server.rounds.client_evaluation import Merged, merged
from atoll.server.rounds.record import CarriedRecord, ClientRecord, RoundRecord, SumRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import MeasuredVersion, WatchedMetric
from atoll.server.views.privacy import guarantee_of
from atoll.simulations.attacks.tally import AttackTally
from atoll.simulations.federation.seal import seal
from atoll.simulations.federation.snapshots import WAY_OUT
from atoll.task.json_text import to_json
from atoll.task.metrics import NOT_FINITE, Metrics, Statistics, merge, merge_alike, names_refused, values

FATES_MAX = 1000
"""Maximum number of invitations of a round whose fates are listed, and maximum number of listed failures."""

REASON_MAX = 200
"""Maximum number of characters of a client's reason."""

REASONS = {"failures": Fate.FAILED, "refusals": Fate.REFUSED, "losses": Fate.LOST}
"""Keys of a round's line with the reasons of failed, refused and lost clients, by client."""

ROUNDS, RESULT = "rounds.jsonl", "result.json"
SETTINGS, POPULATION = "run.toml", "population.json"

OF_SUMS = ""
"""The name of the metrics of a round's secure sums, which are those of no client."""

SIMULATED = "simulated"
"""What the records of a run with `[secure]` say: its sessions protect nothing, as one process plays all parts."""

NOISE_COHORT = "simulation.noise_cohort_size"
"""The only setting of the computation on which what is computed depends."""

Json = dict[str, Any]


@dataclass(slots=True)
class Measured:
    """Measurements of one version."""

    server: Statistics | None = None
    clients: Mapping[str, Statistics] = field(default_factory=dict)
    max_share: float = 1.0
    """The largest share that one client may have in a metric of the clients."""

    def values(self, metrics: Metrics, *, with_clients: bool, malicious: Container[str] = ()) -> Json:
        """Return the part of a round's line about its version, with the values of each client if requested.

        If some clients are malicious, it includes the values over all honest clients.
        """
        line: Json = {}
        if self.server is not None:
            line["server"] = values(metrics, self.server)
        if self.clients:
            line["clients"] = values(metrics, self._together(self.clients).sums or {})
            is_of_each = OF_SUMS not in self.clients
            if malicious and is_of_each:
                honest = {name: sums for name, sums in self.clients.items() if name not in malicious}
                line["honest_clients"] = values(metrics, self._together(honest).sums or {})
            if with_clients and is_of_each:
                line["client_values"] = {name: values(metrics, sums) for name, sums in sorted(self.clients.items())}
        return line

    def _together(self, clients: Mapping[str, Statistics]) -> Merged:
        named = {ClientId(name): sums for name, sums in clients.items()}
        return merged(named, max_share=self.max_share)

    def capped(self) -> dict[str, str]:
        """Return the clients whose weight in a metric is capped, with the reason."""
        capped = self._together(self.clients).capped if self.max_share < 1 else {}
        return {str(name): why for name, why in sorted(capped.items())}

    def refusals(self) -> dict[str, str]:
        """Return the measurements that are omitted, by `server` or `clients` and the metric, each with the reason."""
        found: dict[str, str] = {}
        if merge_alike(self.clients.values()) is None:
            found |= refusals_of("clients", sorted(self.clients.items()))
            found |= {f"clients.{name}": why for name, why in self._together(self.clients).left_out.items()}
        return found | {name: NOT_FINITE for name in refusals_of("server", [("server", self.server or {})])}


def refusals_of(where: str, statistics: Iterable[tuple[str, Statistics]]) -> dict[str, str]:
    """Return the metrics whose sums were refused, as `where.metric`, each with the owners of the sums."""
    owners: dict[str, list[str]] = {}
    for owner, sums in statistics:
        if all(map(len, sums.values())):  # almost always
            continue
        for name in names_refused(sums):
            owners.setdefault(f"{where}.{name}", []).append(owner)
    return {name: f"{NOT_FINITE} at {some_of(of_name)}" for name, of_name in sorted(owners.items())}


def line_of(
    record: RoundRecord,
    metrics: Metrics,
    *,
    train: Sequence[tuple[str, Statistics]],
    totals: Mapping[str, Any],
    ended: Mapping[Fate, int] | None = None,
    malicious: Collection[str] = (),
    is_uniform: bool = False,
) -> Json:
    """Return the line of one round.

    Args:
        record: the run machine's record of the round.
        metrics: the metrics of the task.
        train: the sums that each client measured during training.
        totals: seconds and bytes since the beginning of the run, which are added to the line.
        ended: in an asynchronous run, the number of invitations of any round that have ended since the last line, by
            fate (`invitation_tally`); None: the fates count this round's invitations.
        is_uniform: whether all updates weigh the same (`aggregation.weighting`), whatever their examples.
        malicious: the clients of the attack; if any, the line lists those it invited, and has `honest_train`.

    Returns:
        The line, with `fates` and `train_values` by client for at most `FATES_MAX` invitations, with the reasons of
        `REASONS` by client if there are any, with the `clip_norm` of a private round that follows the updates, and with
        `not_finite` if sums were refused: the metrics that exclude clients, each with these clients.
    """
    fates = Counter(client.fate for client in record.clients.values()) if ended is None else Counter(ended)
    in_model = fates[Fate.REPORTED] if record.mode == "sync" else len(record.buffer)
    line: Json = {
        "round": int(record.round_id),
        "version": None if record.version is None else int(record.version),
        "state": str(record.phase),
        "why": str(record.close_reason or record.abandon_reason or ""),
        "detail": record.detail,
        "opened_s": record.opened_at,
        "round_s": (record.ended_at or record.opened_at) - record.opened_at,
        "invited": len(record.clients),
        "reported": fates[Fate.REPORTED],
        "late": len(record.carried),
        "counted": 0 if record.version is None else in_model + len(record.carried),
        "lost": fates[Fate.LOST],
        "failed": fates[Fate.FAILED],
        "refused": fates[Fate.REFUSED],
        "stragglers": fates[Fate.STRAGGLER] + fates[Fate.LATE] + fates[Fate.CARRIED],
        "released": fates[Fate.RELEASED],
        "num_steps": sum(client.steps for client in record.clients.values()),
        **({} if record.clip_norm is None else {"clip_norm": record.clip_norm}),
        **totals,
        **({} if record.charge is None else {"epsilon": record.charge.epsilon}),
        "train": values(metrics, sums) if (sums := merge(sums for _, sums in train)) else None,
        "server": None,
        "clients": None,
    }
    if malicious:
        honest = None if record.sums else merge(sums for name, sums in train if name not in malicious)
        line["malicious"] = sorted(record.clients.keys() & set(malicious))[:FATES_MAX]
        line["honest_train"] = values(metrics, honest) if honest else None
    if record.sums:
        line |= {"secure": SIMULATED, "sums": [_of_sum(row) for row in record.sums[:FATES_MAX]]}
    if record.mode != "sync":
        line |= _of_buffer(record)
    elif record.carried:
        line["carried"] = [_stale(row, record, is_uniform=is_uniform) for row in record.carried[:FATES_MAX]]
    if len(record.clients) <= FATES_MAX:
        line |= _of_clients(record, metrics, train)
    if record.capped:
        line["capped"] = {"weight": record.weight_cap, "clients": dict(sorted(record.capped.items())[:FATES_MAX])}
    if left_out := refusals_of("train", train):
        line["not_finite"] = left_out
    for key, fate in REASONS.items():
        if fates[fate] if ended is None else any(client.fate is fate for client in record.clients.values()):
            of_fate = islice(record.with_fate(fate), FATES_MAX)
            line[key] = {name: _reason_of(client) for name, client in of_fate}
    return line


def _of_clients(record: RoundRecord, metrics: Metrics, train: Sequence[tuple[str, Statistics]]) -> Json:
    """Return the part of a round's line with the clients by name; secure sums have no metrics of single ones."""
    of_all = sorted(record.clients.items())
    line: Json = {
        "fates": {name: str(client.fate) for name, client in of_all},
        "steps": {name: client.steps for name, client in of_all if client.steps},
    }
    if record.sums:
        left = {name: row.sum.left for name, row in of_all if row.sum is not None and row.sum.left}
        found = {"left": left, "only_dropped": dict(sorted(record.only_dropped.items()))}
        return line | {key: value for key, value in found.items() if value}
    of_clients = sorted(train, key=itemgetter(0))  # a client may be in a buffer twice: its last training counts
    return line | {"train_values": {name: values(metrics, sums) for name, sums in of_clients}}


def _of_sum(row: SumRecord) -> Json:
    """Return a session's outcome: its members, its attempt, and why it counts in no version."""
    line: Json = {"session": row.session, "members": row.num_members, "attempt": row.attempt, "stage": str(row.stage)}
    if row.is_dropped:
        line["dropped"] = True
    return line | ({"detail": row.detail} if row.detail else {})


def history_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, Json]:
    """Return the metrics by kind ("train", "clients", "server") and version, for the `main()` of a Flower app.

    Each version has a training. As in Flower, a metric is NaN if one client's is not finite.
    """
    history: dict[str, Json] = {"train": {}, "clients": {}, "server": {}}
    for line in lines:
        refused = [name.partition(".") for name in line.get("not_finite", {})]
        found = {"train": line["train"] or {}, "clients": line["clients"], "server": line["server"]}
        for kind, numbers in found.items():
            if line["version"] is not None and numbers is not None:
                defined = {name: value for name, value in numbers.items() if value is not None}
                odd = {name: math.nan for of_kind, _, name in refused if of_kind == kind}
                history[kind][str(line["version"])] = defined | odd
    return history


def best_of(metric: WatchedMetric | None, best: MeasuredVersion | None) -> Json:
    """Return the best version for the result of a run; nothing if no metric decides or none has a value."""
    if metric is None or best is None:
        return {}
    return {"best": {"version": int(best.version), "metric": metric.name, "source": metric.source, "value": best.value}}


def of_privacy(machine: RunMachine, cohort: int, noise_cohort: int | None) -> Json:
    """Return the account of a private run for its result; nothing if it has none. It is marked as no guarantee.

    Args:
        machine: of the run.
        cohort: clients of a round.
        noise_cohort: those whose noise its sums have; None: the same.
    """
    found = guarantee_of(machine)
    if found is None:
        return {}
    would, more = "deployed it would be", {}
    if noise_cohort is not None:
        would = f"deployed with cohorts of {count_of(noise_cohort, 'client')} it would be"
        more = {"noise_cohort_size": noise_cohort}
    sentence = f"no guarantee, as {_of_noise(cohort, noise_cohort)}; {would}: {found['sentence']}"
    return {"privacy": found | more | {"simulated": True, "sentence": sentence}}


def note_of_noise(cohort: int, noise_cohort: int | None) -> str:
    """Return the note of a private run, which says that it has no guarantee; arguments as of `of_privacy`."""
    protects = "it protects nothing, and shows what noise does"
    return f"privacy: no guarantee, as {_of_noise(cohort, noise_cohort)}: {protects}"


def _of_noise(cohort: int, noise_cohort: int | None) -> str:
    follows = "the noise of a simulation follows from its seed"
    if noise_cohort is None:
        return follows
    return f"{follows}, and its sums of {count_of(cohort, 'client')} have the noise of a cohort of {noise_cohort:,}"


def _of_buffer(record: RoundRecord) -> Json:
    """Return the updates that the version counts, and the invitations that became too old since the last one."""
    return {
        "buffer": [_stale(row, record, is_uniform=True) for row in record.buffer[:FATES_MAX]],
        "too_old": [
            {"client": row.client_id, "round": int(row.round_id), "staleness": row.staleness}
            for row in record.too_old[:FATES_MAX]
        ],
    }


def _stale(row: CarriedRecord, record: RoundRecord, *, is_uniform: bool) -> Json:
    """Return an update that may be late: its client, round, version and weight, n_k s_k or s_k alone."""
    return {
        "client": row.client_id,
        "round": int(row.round_id),
        "staleness": row.staleness,
        "version": int(record.base_version) - row.staleness,
        "weight": row.scale if is_uniform else row.num_examples * row.scale,
    }


def _reason_of(client: ClientRecord) -> str:
    """Return the reason of a failure, a refusal or a loss with its detail."""
    detail = client.detail
    if any(line.startswith(" ") for line in detail.splitlines()):  # a traceback: its end says what happened
        detail = conclusion(detail)
    return f"{client.reason}: {detail}"[:REASON_MAX] if detail else client.reason


class Tally:
    """Steps of the accepted updates, and the counted reasons of failed, refused and lost clients.

    Reasons are counted by the words before the colon.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {key: Counter() for key in REASONS}
        self._first: dict[tuple[str, str], str] = {}
        self._num_steps = 0
        self._attack = AttackTally()

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the reasons and the steps in the line of a round."""
        self._num_steps += line.get("num_steps", 0)
        self._attack.add(line.get("attack", {}))
        for key, counts in self._counts.items():
            for client, reason in line.get(key, {}).items():
                word = reason.partition(":")[0]
                counts[word] += 1
                self._first.setdefault((key, word), f"{client}: {' '.join(reason.split())}")

    @property
    def result(self) -> Json:
        """The part of a run's result: the steps, and of each kind and reason the number and the first client."""
        reasons = {
            key: {word: {"count": count, "first": self._first[key, word]} for word, count in counts.most_common()}
            for key, counts in self._counts.items()
            if counts
        }
        attack = {"attack": found} if (found := self._attack.result) else {}
        return {"num_steps": self._num_steps} | attack | reasons


class RunFolder:
    """Files of one run's report.

    Args:
        folder: the folder of the run.
        num_rounds: the number of rounds whose lines are valid; later lines belong to rounds that are repeated.
        digest: the SHA-256 of these lines; None: the run begins.

    Raises:
        StoreCorrupted: some of the lines of ended rounds are missing or damaged.
    """

    def __init__(self, folder: Path, num_rounds: RoundId | int = 0, digest: str | None = None) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ROUNDS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        valid = [line for line in lines if _is_round_up_to(line, num_rounds)]
        self._sha256 = sha256(b"".join(valid))
        if len(valid) < num_rounds:
            raise StoreCorrupted(f"{path}: has the lines of {len(valid)} of {count_of(num_rounds, 'round')} that ended")
        if digest is not None and self.digest != digest:
            raise StoreCorrupted(f"{path}: the lines of ended rounds were changed; {WAY_OUT}")
        if valid != lines:
            write_atomically(path, b"".join(valid))
        self._rounds, self._tally = path.open("ab"), Tally()
        for line in valid:
            self._tally.add(json.loads(line))

    @property
    def digest(self) -> str:
        """The SHA-256 of the lines so far."""
        return self._sha256.hexdigest()

    def add(self, line: Json) -> None:
        """Append the line of a round."""
        text = (to_json(line) + "\n").encode()
        self._rounds.write(text)
        self._rounds.flush()
        self._sha256.update(text)
        self._tally.add(line)

    def finish(self, result: Json) -> None:
        """Write the result of a run that has ended or was interrupted, with the reasons of clients in `REASONS`."""
        result |= self._tally.result
        text = to_json(result, indent=2) + "\n"
        (self._folder / RESULT).write_text(text, encoding="utf-8")
        seal(self._folder, (ROUNDS, RESULT, SETTINGS, POPULATION))

    def close(self) -> None:
        """Close the file of the rounds."""
        self._rounds.close()


def _is_round_up_to(line: bytes, num_rounds: int) -> bool:
    try:
        return int(json.loads(line)["round"]) <= num_rounds
    except (ValueError, KeyError, TypeError):
        return False  # truncated by an interruption
