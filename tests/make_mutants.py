"""The sample of mutmut's mutants of the machines' files, drawn by seed and stored in `tests/generated_mutants.json`.

    python -m tests.make_mutants --each 16

mutmut's own runner copies the source to another folder and switches mutants by a trampoline, which does not follow the
links by which `atoll` finds its rooms. So only its operators are used (`mutmut.mutation.file_mutation`), and
`tests/mutants.py` plants and judges the results. Texts and assertions are excluded, because they are not rules.
"""

import argparse
import contextlib
import difflib
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import libcst as cst
from mutmut.mutation.file_mutation import create_mutations, deep_replace

from tests.mutants import GENERATED, ROOT, Mutant

FILES = (
    "server/rounds/cohort_round.py",
    "server/rounds/open_round.py",
    "server/rounds/buffer_round.py",
    "server/rounds/async_invitations.py",
    "server/rounds/run_machine.py",
    "server/rounds/update_intake.py",
    "server/rounds/ledger.py",
    "server/members/membership.py",
    "client/session/session.py",
)
SEED = 7


def mutated_sources(file: str) -> Iterator[str]:
    """Yield the source of every mutant that mutmut makes of a file."""
    source = (ROOT / file).read_text()
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        Path("setup.cfg").write_text("[mutmut]\nsource_paths=.\n")  # mutmut insists on a project
        module, mutations, _, _ = create_mutations(file, source)
    texts = cst.SimpleString | cst.FormattedString | cst.ConcatenatedString | cst.Assert
    for mutation in mutations:
        if not isinstance(mutation.original_node, texts):
            changed = deep_replace(module, mutation.original_node, mutation.mutated_node)
            assert isinstance(changed, cst.Module)
            if changed.code != source:
                yield changed.code


def mutant_from(file: str, number: int, changed: str) -> Mutant:
    """Return a mutant with the changed lines, and with enough lines around them to identify the place."""
    before, after = (ROOT / file).read_text().splitlines(True), changed.splitlines(True)
    blocks = [
        op for op in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if op[0] != "equal"
    ]
    first, last, to_first, to_last = blocks[0][1], blocks[-1][2], blocks[0][3], blocks[-1][4]
    shown = f"{''.join(before[first:last]).strip()}  ->  {''.join(after[to_first:to_last]).strip()}"
    while "".join(before).count("".join(before[first:last])) != 1:
        first, last = max(0, first - 1), min(len(before), last + 1)
        to_first, to_last = max(0, to_first - 1), min(len(after), to_last + 1)
    name = f"mutmut {Path(file).stem} {number}"
    return Mutant(name, file, "".join(before[first:last]), "".join(after[to_first:to_last]), shown)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.make_mutants", description=__doc__)
    parser.add_argument("--each", type=int, default=16, help="number of mutants of each file")
    arguments = parser.parse_args()
    stored = []
    for file in FILES:
        sources = list(mutated_sources(file))
        chosen = sorted(random.Random(f"{SEED} {file}").sample(range(len(sources)), min(arguments.each, len(sources))))
        stored += [asdict(mutant_from(file, number, sources[number])) for number in chosen]
        print(f"{file}: {len(chosen)} of {len(sources)} mutants stored")
    GENERATED.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
