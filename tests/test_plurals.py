"""Numbers with their nouns: one of a thing is in the singular, in every message.

A number in an f-string with a plural behind it, `f"{number} rounds"`, says `1 rounds` one day: `count_of` is for it.
"""

import ast
import re
from itertools import pairwise

import pytest

from tests.house.tree import ROOMS, ROOT

"""All rooms."""

_WORDS = """
    actions actors addresses aggregators attempts axes batches bits blocks boxes bytes calls candidates cells
    certificates characters checkpoints clients columns commands connections cores days devices digits dimensions
    elements entries epochs events examples failures faults files groups histories hours invitations items labels
    layers lines machines members meshes messages metrics micro-batches minutes nodes pairs parameters parts pieces
    places processes processors ranks readings records requests restarts rounds rows runs samples seconds sequences
    shards signatures sites stages steps sums tasks tensors times tokens trainings transactions tries updates users
    values versions words workers
"""
PLURALS = frozenset(_WORDS.split())
"""The plurals of what Atoll counts."""

_BEHIND = re.compile(r" ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?")
_NO_ADJECTIVE = {"and", "are", "at", "for", "has", "in", "is", "lets", "needs", "of", "or", "stay", "there", "with"}
_CONSTANT = re.compile(r"[A-Z_0-9 */]+")

ALLOWED = {
    "tensors/codecs/installed.py: len(name)": "more than NAME_MAX",
    "aggregation/fold/prepared.py: ', '.join(cut[:5])": "names of tensors",
    "aggregation/custom_optimizer.py: master.shape": "a shape",
    "plugins/place.py: self.tensor": "the name of a tensor, in the seed of a generator",
    "tensors/coverage.py: len(lengths)": "one of two numbers",
    "parallel/huggingface/pipeline_trial.py: kind": "a name, before a verb",
    "parallel/mesh_client/faults.py: local.optimizer_name": "a name, before a verb",
    "parallel/mesh_client/faults.py: plan.mesh.size": "more than RANKS_MAX",
    "parallel/mesh_client/faults.py: plan.microbatches": "more than one, by the condition above",
    "parallel/mesh_client/supervisor/interval.py: text": "what an operator has written, with the unit that it lacks",
    "parallel/engine/admissible.py: where": "a mesh in words",
    "parallel/engine/plan.py: plan.microbatches": "more than one, by the condition above",
    "task/collated.py: number": "more than 2^30",
    "parallel/trials/between_passes.py: number": "more than one, by the condition above",
    "parallel/trials/mixed_rows.py: rows": "more than one, as they have halves",
    "parallel/trials/mixed_rows.py: plan.mesh.dp": "more than one, by the condition of the line",
    "parallel/trials/mixed_rows.py: plan.microbatches": "more than one, by the condition of the line",
    "protocol/run_names.py: len(found)": "more than one, by the condition above",
    "task/metrics.py: lengths": "several numbers in words",
    "server/config/run_changes.py: new.rounds": "another number than before, as of a schedule, which has several",
    "parallel/planner/choice.py: narrowest": "more than one, as every rank by itself is a mesh of tp = 1",
    "task/programs/grid.py: len(text)": "more than NAME_MAX",
    "examples/datasets/shakespeare.py: min_lines": "a setting, whose default is not one",
    "parallel/planner/search.py: states / room": "a ratio",
    "parallel/planner/search.py: where": "the name of an axis",
    "parallel/world.py: world.size": "more than one, by the condition above",
    "atoll/cli/runs/models.py: version['parts']": "more than one, as one part is another branch",
    "atoll/cli/training/plan.py: plan.stages": "more than one, by the condition of the line",
    "atoll/cli/training/progress.py: event['tokens_per_s']": "a rate",
    "atoll/operations/training/job.py: read_world().size": "more than one, by the condition above",
    "atoll/cli/training/train.py: result.epochs": "a fraction",
    "protocol/identity/handshake_fault.py: address": "the name of a server, before a verb",
    "protocol/wire/mesh_use.py: self.steps_per_s": "a rate",
    "protocol/settings.py: value.bit_length()": "more than 10 000",
    "server/config/privacy.py: smallest": "more than two, as any session",
    "server/config/privacy.py: number": "more than one, by the condition above",
    "server/config/privacy.py: self._apart": "more than one, by the condition above",
    "server/views/sentences.py: charge.charges": "more than the clients, by the condition of the line",
    "server/config/secure.py: largest": "more than one, as sessions of two sizes differ",
    "server/config/secure.py: len(text)": "more than TEXT_MAX",
    "server/config/secure.py: size": "more than two, as any session",
    "server/config/secure.py: sizes": "a number with its noun",
    "server/sessions/session.py: self.size": "more than two, as any session",
    "tensors/secure/vector.py: bits": "32 or 64",
    "tensors/secure/vector.py: largest": "a magnitude",
    "server/rounds/policy.py: self.num_wanted": "more than one, by the condition of the line",
    "server/rounds/waiting.py: trouble.failures": "more than one, by the condition of the line",
    "server/transfers/timeouts.py: patience.floor": "a rate",
    "server/views/notices.py: client": "a name, before a verb",
    "server/views/sentences.py: number": "more than two, as once and twice are words",
    "tests/histories/soak.py: median(self.num_rounds)": "a median",
    "tests/histories/soak.py: median(self.num_events)": "a median",
    "tests/histories/world.py: sequence": "more than ACTIONS_MAX",
    "simulations/populations/plot.py: report.examples_max": "the end of a range",
}
"""The numbers that may stand before a plural, each with the reason."""


def numbers_before_plurals(source: str) -> list[str]:
    """Return the expressions in the f-strings of a source that a plural follows, except constants and `count_of`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for number, text in pairwise(parts):
            if isinstance(number, ast.FormattedValue) and isinstance(text, ast.Constant):
                expression = ast.unparse(number.value)
                if _begins_with_a_plural(str(text.value)) and not _is_counted(expression):
                    found.append(expression)
    return found


def _begins_with_a_plural(text: str) -> bool:
    """Return whether a text begins with a plural, or with an adjective and a plural."""
    if (behind := _BEHIND.match(text)) is None:
        return False
    first, second = behind.groups()
    return first in PLURALS or (first not in _NO_ADJECTIVE and second in PLURALS)


def _is_counted(expression: str) -> bool:
    is_constant = _CONSTANT.fullmatch(expression.rpartition(".")[2]) is not None
    return is_constant or expression.startswith(("count_of(", "_count(", "printable_size("))


@pytest.mark.parametrize("room", ROOMS)
def test_no_number_stands_before_a_plural(room: str) -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in (ROOT / room).rglob("*.py")}
    found = {f"{path}: {number}" for path, source in sources.items() for number in numbers_before_plurals(source)}
    assert found == {known for known in ALLOWED if known.startswith(f"{room}/")}


def test_the_check_finds_a_number_before_a_plural() -> None:
    source = """
one = f"{rounds} rounds are over"
two = f"{len(bad)} late updates, {MOST} rounds, {count_of(n, 'round')} of rounds"
"""
    assert numbers_before_plurals(source) == ["rounds", "len(bad)"]
