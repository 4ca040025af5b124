"""The deaths of runs with secure sums: the rows of `crash_matrix --secure`.

A row has the step of each process that dies, joined by ` + `: of the coordinator or a rank or the site a first, then of
further sites (a and b, or b and c), or of the coordinator in its next life. The kinds of run come after them:

    + mesh          the site a is a mesh of two ranks, of which one dies at a step `crew.`
    + evaluations   the sites measure each version, in secure sums
    + ranks         two aggregation ranks; at a step `rank.` or `upload.` each of them dies once
    + wrong shares  two sites reveal wrong shares in the first round, which no sum opens with
    + wrong words   one site adds something else than its update in the first round
    + full disk     from the first death on its process has too little room for an update or a version; it dies again
                    when it has met that, and has room some seconds later
    + no space      the same, without any room: it cannot even start

`tests/benchmarks/test_evidence.py` holds that each crash point of the source is in a row.
"""

from collections.abc import Iterable, Mapping

from atoll.parallel.mesh_client.crash_points import OF_SUMS

PLAIN = (
    *(f"journal.{when}_write:{n}" for when in ("before", "after") for n in (2, 6, 10, 14, 18)),
    *(f"round.entry/{kind}:1" for kind in ("RunStarted", "ClientJoined", "RoundDue", "CohortDrawn", "UploadBegun")),
    *(f"round.entry/KeysCame:{n}" for n in (1, 4, 6)),
    *(f"round.entry/SharesCame:{n}" for n in (1, 4, 5)),
    *(f"round.entry/SurvivorsSigned:{n}" for n in (1, 3, 4)),
    *(f"round.entry/SharesRevealed:{n}" for n in (1, 3, 4)),
    *(f"round.entry/SumOpened:{n}" for n in (1, 2)),
    *(f"round.entry/UpdateReceived:{n}" for n in (1, 3, 4)),
    *(f"round.entry/Aggregated:{n}" for n in (1, 2)),
    "round.effect/DrawCohort:1",
    *(f"round.effect/Invite:{n}" for n in (1, 3, 5)),
    *(f"round.effect/TellMember:{n}" for n in (1, 4, 6, 10, 15)),
    "round.effect/Accept:3",
    *(f"round.effect/OpenSum:{n}" for n in (1, 2)),
    *(f"round.effect/Aggregate:{n}" for n in (1, 2)),
    *(f"round.effect/Commit:{n}" for n in (1, 2)),
    "round.effect/OpenNextRound:2",
    *(f"aggregate.{step}:{n}" for step in ("before_fold", "mid_fold", "after_fold") for n in (1, 2)),
    *(f"{step}.{when}:{n}" for step in ("publish", "snapshot") for when in ("before", "after") for n in (1, 2)),
    *(f"upload.{step}:2" for step in ("mid_chunk", "before_check", "before_accept")),
    "download.mid:2",
    *(f"agent.{step}:{n}" for step in ("invited", "downloading", "downloaded", "training") for n in (1, 2)),
    *(f"agent.encoded:{n}" for n in (1, 2)),
    *(f"agent.promised/{kind}:{n}" for kind in ("joined", "signed") for n in (1, 2)),
    *(f"agent.{step}:{n}" for step in ("masked", "uploading", "uploaded", "answered", "revealed") for n in (1, 2)),
    *(f"agent.{step}:1" for step in ("trained", "settled")),
    "round.entry/SharesCame:3 + round.entry/CoordinatorStarted:1",
    "round.entry/SharesRevealed:3 + round.entry/CoordinatorStarted:1",
    "round.entry/ClientDisconnected:1 + agent.masked:1",
    "round.entry/SessionLeft:1 + agent.masked:1",
    "round.entry/SessionLeft:1 + agent.promised/joined:1",
    "round.entry/SharesRevealed:2 + agent.answered:1",
    "agent.masked:1 + agent.masked:1",
    "agent.answered:1 + agent.promised/signed:1",
    "round.effect/Invite:6 + agent.masked:1 + agent.masked:1",
    "round.entry/KeysCame:7 + agent.masked:1 + agent.uploading:1",
    "round.entry/SumOpened:1 + agent.masked:1 + agent.promised/joined:1",
)

MESHED = (
    *(f"{step}:{n} {rank}" for step in OF_SUMS for n in (1, 2) for rank in (0, 1)),
    *(f"crew.{step}:1 1" for step in ("starting", "loading", "filling", "filled", "mid_step", "stepped", "trained")),
    *(f"crew.{step}:1 1" for step in ("saving", "saved", "part_written", "answering")),
    "crew.part_masked:1 1 stop",
    "agent.trained:1",
    "agent.part_written:1",
    "agent.part_written:3",
    "agent.root_spooled:1",
    "agent.root_spooled:2",
    *(
        f"agent.{step}:1"
        for step in ("encoded", "promised/joined", "masked", "uploading", "promised/signed", "revealed")
    ),
    *(f"upload.part_kept:{n}" for n in (1, 2)),
)

EVALUATED = (
    *(f"round.effect/AskEvaluation:{n}" for n in (1, 5)),
    *(f"round.entry/MaskedCame:{n}" for n in (1, 3, 4)),
    *(f"round.entry/KeysCame:{n}" for n in (5, 8)),
    "round.entry/SurvivorsSigned:6",
    "round.entry/SharesRevealed:7",
    *(f"round.entry/SumOpened:{n}" for n in (2, 4)),
    "round.effect/OpenSum:2",
    "round.effect/CloseEvaluation:1",
    *(f"agent.{step}:2" for step in ("promised/joined", "masked", "promised/signed", "revealed")),
    "round.entry/MaskedCame:2 + agent.masked:2",
)
"""Most of them die within an evaluation."""

RANKED = (
    *(f"rank.{step}:{n}" for step in ("mid_fold", "folded") for n in (1, 2)),
    *(f"aggregate.{step}:{n}" for step in ("before_fold", "after_fold") for n in (1, 2)),
    "upload.before_accept:2",
    "round.entry/SharesRevealed:3",
    "round.entry/SumOpened:1",
    "round.effect/OpenSum:1",
    "round.effect/Aggregate:2",
    "publish.before:1",
    "agent.masked:1",
    "agent.uploading:2",
    "rank.mid_fold:1 + agent.promised/signed:1",
)

WRONG_SHARES = (
    *(f"round.entry/OpeningFailed:{n}" for n in (1, 2)),
    "round.effect/OpenSum:2",
    "round.effect/Abandon:1",
    "round.entry/OpeningFailed:1 + agent.promised/signed:2",
)

WRONG_WORDS = ("round.entry/SumOpened:1", "round.entry/AggregationFailed:1", "round.effect/Abandon:1")

FULL = (
    *(f"round.entry/{kind}" for kind in ("KeysCame:4", "SharesCame:4", "UpdateReceived:2", "SharesRevealed:2")),
    "round.entry/SumOpened:1",
    *(f"aggregate.{step}:1" for step in ("before_fold", "mid_fold", "after_fold")),
    "round.entry/SharesCame:4 + round.entry/DiskShort:1",
    "round.entry/SharesCame:4 + round.entry/DiskFree:1",
    *(f"agent.{step}:1" for step in ("invited", "training", "encoded", "promised/joined", "masked", "uploaded")),
    *(f"agent.{step}:1" for step in ("promised/signed", "revealed")),
    *(f"rank.{step}:1 + ranks" for step in ("mid_fold", "folded")),
    *(f"agent.{step}:1 + mesh" for step in ("encoded", "promised/joined")),
    "crew.part_encoded:1 1 + mesh",
)

WITHOUT_SPACE = (
    *(f"round.entry/{kind}" for kind in ("SharesCame:3", "SurvivorsSigned:2")),
    *(f"agent.{step}:1" for step in ("encoded", "promised/joined", "promised/signed")),
    "rank.mid_fold:1 + ranks",
)

KINDS: Mapping[str, tuple[str, ...]] = {
    "": PLAIN,
    "mesh": MESHED,
    "evaluations": EVALUATED,
    "ranks": RANKED,
    "wrong shares": WRONG_SHARES,
    "wrong words": WRONG_WORDS,
    "full disk": FULL,
    "no space": WITHOUT_SPACE,
}

NOT_IN_SUMS = {
    "exchange.entry": "runs of messages have no secure sums",
    "exchange.effect": "runs of messages have no secure sums",
    "agent.spooled": "an update for a sum is encoded, and is in the spool when it is masked",
}
"""The crash points that no run with secure sums comes to."""


def rows() -> list[str]:
    """Return all rows."""
    return [f"{row} + {kind}" if kind else row for kind, of_kind in KINDS.items() for row in of_kind]


def read(row: str) -> tuple[list[str], set[str]]:
    """Return the steps of a row, in order, and its kinds of run."""
    parts = row.split(" + ")
    steps = [part for part in parts if "." in part]
    kinds = {part for part in parts if "." not in part}
    if steps[0].startswith("crew."):
        kinds.add("mesh")
    if unknown := kinds - KINDS.keys():
        raise ValueError(f"{row}: there is no run {', '.join(sorted(unknown))}; allowed: {', '.join([*KINDS][1:])}")
    return steps, kinds


def steps_of(of: Iterable[str]) -> set[str]:
    """Return the steps that some rows have, with their kinds of event or effect, without the number of the visit."""
    return {step.partition(":")[0] for row in of for step in read(row)[0]}
