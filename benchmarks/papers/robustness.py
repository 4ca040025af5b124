"""The table of `docs/robustness.md`: every attack against every robust rule, on digits, IID and Dirichlet.

    python -m benchmarks.papers.robustness [--jobs N] [--out DIR] [--page FILE]

20 clients, 4 of them malicious, all in each of 60 rounds of five local steps. An entry is the accuracy on the server's
test data, as the mean over the last five versions, so that one lucky round does not count. For the backdoor it is
followed by its success: the share of triggered test images that get the adversary's label.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.simulations.attacks.backdoor import success
from atoll.simulations.attacks.config import AttackConfig
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import read_run
from atoll.simulations.experiments.table import markdown
from atoll.tensors import safetensors_file
from benchmarks.papers.digits import task
from benchmarks.papers.pages import write_parts
from benchmarks.papers.process_pool import run_with_progress

PAGE = Path(__file__).resolve().parents[2] / "docs" / "robustness.md"
TASK = "benchmarks.papers.digits:task"
LAST = 5
"""Number of last versions whose mean accuracy counts."""

Changes = Mapping[str, Any]

BASE: Changes = {
    "rounds": 60,
    "seed": 1,
    "local.lr": 0.3,
    "population.clients": 20,
    "round.cohort_size": 20,
    "round.over_selection": 1.0,
    "simulation.engine": "batched",
}

SPLITS: Mapping[str, Changes] = {
    "IID": {"population.kind": "iid"},
    "Dirichlet(0.3)": {"population.kind": "dirichlet", "population.alpha": 0.3},
}

ATTACKS: Mapping[str, Changes] = {
    "none": {},
    **{
        kind.replace("_", " "): {"attack.kind": kind, "attack.malicious": 4}
        for kind in ("label_flip", "sign_flip", "scaled_flip", "gaussian", "alie", "ipm", "free_rider", "backdoor")
    },
}

FOUR = {"aggregation.malicious": 4}
RULES: Mapping[str, Changes] = {
    "mean": {},
    "norm bound, mean": {"aggregation.norm_bound": "median"},
    "median": {"aggregation.rule": "median"},
    "trimmed mean": {"aggregation.rule": "trimmed_mean", **FOUR},
    "multi-Krum": {"aggregation.rule": "multi_krum", **FOUR},
    "geometric median": {"aggregation.rule": "geometric_median"},
    "centered clipping": {"aggregation.rule": "centered_clipping", "aggregation.radius": 0.5},
    "neighbours, trimmed mean": {"aggregation.rule": "trimmed_mean", "aggregation.mix_neighbours": True, **FOUR},
    "neighbours, geometric median": {
        "aggregation.rule": "geometric_median",
        "aggregation.mix_neighbours": True,
        **FOUR,
    },
}


def cell(split: str, rule: str, attack: str, **changes: Any) -> Cell:
    """Return one run of the table."""
    settings = {**BASE, **SPLITS[split], **RULES[rule], **ATTACKS[attack], **changes}
    return Cell({"split": split, "rule": rule, "attack": attack}, settings, TASK)


def cells() -> list[Cell]:
    """Return all runs of the tables."""
    return [cell(split, rule, attack) for split in SPLITS for rule in RULES for attack in ATTACKS]


def accuracy(folder: Path) -> float:
    """Compute the accuracy on the server's test data, as the mean over the last versions."""
    values = read_run(folder).curve("server/accuracy")[1][-LAST:]
    return sum(values) / len(values)


def backdoor(one: Cell, folder: Path) -> float | None:
    """Compute the success of a backdoor under the last version; None: the attack is not a backdoor."""
    options = {key.partition(".")[2]: value for key, value in one.settings.items() if key.startswith("attack.")}
    if options.get("kind") != "backdoor":
        return None
    newest = max((folder / "models" / "versions").glob("*.safetensors"))
    return success(task, AttackConfig.model_validate(options), dict(safetensors_file.read(newest)))


def entry(one: Cell, out: Path) -> str:
    """Return the text of a cell in the table."""
    folder = out / one.folder
    success_rate = backdoor(one, folder)
    return _short(accuracy(folder)) + ("" if success_rate is None else f" / {_short(success_rate)}")


def _short(share: float) -> str:
    text = f"{share:.3f}"
    return text if share >= 1 else text.removeprefix("0")


def tables(out: Path) -> dict[str, str]:
    """Return the tables in Markdown by split; accuracies more than 0.1 below those without attack are bold."""
    return {split: _table(split, out) for split in SPLITS}


def _table(split: str, out: Path) -> str:
    lines = []
    for rule in RULES:
        clean = accuracy(out / cell(split, rule, "none").folder)
        line = [rule]
        for attack in ATTACKS:
            one = cell(split, rule, attack)
            is_broken = accuracy(out / one.folder) < clean - 0.1
            line.append(f"**{entry(one, out)}**" if is_broken else entry(one, out))
        lines.append(line)
    return markdown(["rule", *(f"{name} / success" if name == "backdoor" else name for name in ATTACKS)], lines)


def main(arguments: list[str]) -> None:
    """Run the cells that are not over, and write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers.robustness")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--out", type=Path, default=Path("atoll-robustness"), help="folder of the runs")
    parser.add_argument("--page", type=Path, default=PAGE, help="page in which the measured parts are replaced")
    options = parser.parse_args(arguments)
    run_with_progress(cells(), options.out, jobs=options.jobs)
    write_parts(options.page, {f"robustness {split}": text for split, text in tables(options.out).items()})
    sys.stdout.write(f"{options.page}: written\n")


if __name__ == "__main__":
    main(sys.argv[1:])
