"""The pages of `--control`: the forms that change a run or its members, and what came of one."""

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import Block, Cell, Facts, Field, Form, Page, Sentences, cell, shown, state_cell, text

ROLES = ("client", "operator", "auditor", "owner", "aggregator")
"""The roles of members that can be invited and revoked."""

ENDED = ("finished", "failed", "stopped")

HOURS, DEADLINE_S = 24, 60
"""The hours for which a join code is valid, and the seconds that sites have for statistics, by default."""

DEADLINE_MAX = 120
"""The most seconds that sites have for statistics: a browser waits for the answer."""


def of_run(place: int, label: str, document: Mapping[str, Any], token: str) -> Page:
    """Return the forms that change a run.

    Args:
        place: the number of the place.
        label: its name.
        document: the run, as `atoll run show --json`.
        token: the token of the visitor's forms.
    """
    run_id, state = str(document["run"]), str(document["state"])
    cause = cell(document["cause"] or document.get("pausing") or document.get("waiting"))
    blocks: list[Block] = [Facts("State", [("state", state_cell(state)), ("cause or wait", cause)])]
    reason = Field("reason", "reason", "")

    def add(act: str, title: str, fields: Sequence[Field], note: str) -> None:
        blocks.append(Form(title, addresses.of_run(place, run_id, f"control/{act}"), title, fields, token, note))

    if state not in (*ENDED, "paused", "pausing"):
        note = "No new round begins; an open one runs to its end."
        add("pause", "Pause", [reason], note)
    if state in (*ENDED, "paused", "pausing"):
        note = "With other settings, or more rounds: `atoll run resume`."
        add("resume", "Resume", [], note)
    if state not in ENDED:
        typed = Field("typed", f"type {shown(run_id)}", "")
        add("stop", "Stop", [typed, reason], "An open round is abandoned, or committed first if it is aggregated.")
    note = "The connected sites are asked by this run's task and settings; the answer comes when all have answered."
    seconds = Field("deadline", f"seconds, at most {DEADLINE_MAX}", str(DEADLINE_S))
    add("statistics", "Ask for statistics", [seconds], note)
    return Page("Control", blocks, addresses.trail(place, label, run_id), addresses.tabs(place, run_id))


def of_members(place: int, label: str, token: str) -> Page:
    """Return the forms that invite and revoke members; arguments as of `of_run`."""
    role, name = Field("role", "role", ROLES[0], ROLES), Field("name", "name", "")
    hours = Field("hours", "hours of validity", str(HOURS))
    note = "The join code is shown once. An earlier code for the same name becomes invalid."
    blocks = [
        Form("Invite", addresses.of_members(place, "control/invite"), "Invite", [role, name, hours], token, note),
        Form(
            "Revoke",
            addresses.of_members(place, "control/revoke"),
            "Continue",
            [role, name],
            note="The next page asks for the name again.",
        ),
    ]
    return Page("Control", blocks, [*addresses.trail(place, label), ("Members", addresses.of_members(place))])


def of_revocation(place: int, label: str, member: Mapping[str, Any], token: str) -> Page:
    """Return the form that revokes a member, as `atoll client members --json` has it; arguments as of `of_run`."""
    role, name = str(member["role"]), str(member["name"])
    note = "Its certificates and join codes become invalid, and its open calls end. Runs continue without it."
    typed = Field("typed", f"type {shown(name)}", "")
    address = addresses.of_members(place, "control/revoke", role=role, name=name)
    facts = [("role", cell(role)), ("name", cell(name)), ("standing", state_cell(str(member["standing"])))]
    blocks: list[Block] = [Facts("Member", facts), Form("Revoke", address, "Revoke", [typed], token, note)]
    return Page(f"Revoke {shown(name)}", blocks, trail_of_members(place, label))


def trail_of_members(place: int, label: str) -> list[tuple[str, str]]:
    """Return the pages above a page that changes members."""
    above = [("Members", addresses.of_members(place)), ("Control", addresses.of_members(place, "control"))]
    return [*addresses.trail(place, label), *above]


def done(
    sentence: str,
    trail: Sequence[tuple[str, str]],
    seen: Sequence[tuple[str, str]],
    *,
    code: str = "",
    document: str = "",
) -> Page:
    """Return what came of a form.

    Args:
        sentence: what was done.
        trail: the pages above it.
        seen: the pages on which it is seen: their text and address.
        code: a join code; empty: none.
        document: a document in JSON; empty: none.
    """
    blocks: list[Block] = [Sentences("Done", [shown(sentence)], links=seen)]
    if code:
        blocks.append(Facts("Join code", [("hand it over in confidence", Cell(code))]))
    if document:
        blocks.append(text("Document", document))
    return Page("Done", blocks, trail)
