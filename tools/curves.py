"""The picture of the README: a metric of a federated and a centralized training, from the folder of `atoll compare`.

atoll compare task.py:task --rounds 20 --epochs 20 --set round.cohort_size=3 --out DIR
python -m tools.curves DIR
"""

import json
import sys
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "curves.svg"
LEFT, TOP, WIDTH, HEIGHT = 60, 46, 660, 200
LOW, HIGH = 0.5, 1.0
"""Limits of the vertical axis."""

STYLE = """text { fill: #1f2328 } .quiet { fill: #59636e; font-size: 12px } .grid { stroke: #d1d9e0 }
    polyline { fill: none; stroke-width: 2 } .federated { stroke: #bc4c00 } .centralized { stroke: #0969da }
    text.federated { fill: #bc4c00; stroke: none } text.centralized { fill: #0969da; stroke: none }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 } .quiet { fill: #9198a1 } .grid { stroke: #3d444d }
      .federated { stroke: #f0883e } .centralized { stroke: #4493f8 }
      text.federated { fill: #f0883e } text.centralized { fill: #4493f8 }
    }"""


def curves(folder: Path) -> dict[str, list[float]]:
    """Read the accuracy after each round, and after each epoch."""
    rounds = [json.loads(line) for line in (folder / "federated" / "rounds.jsonl").read_text("utf-8").splitlines()]
    log = [json.loads(line) for line in (folder / "centralized" / "log.jsonl").read_text("utf-8").splitlines()]
    return {
        "federated": [line["server"]["accuracy"] for line in rounds],
        "centralized": [line["test/accuracy"] for line in log if "test/accuracy" in line],
    }


def draw(found: dict[str, list[float]]) -> str:
    """Return the SVG of some curves, one value for each pass over the data."""
    passes = max(map(len, found.values()))

    def at(number: float, value: float) -> str:
        return f"{LEFT + WIDTH * number / passes:.1f},{TOP + HEIGHT * (HIGH - value) / (HIGH - LOW):.1f}"

    lines = []
    for value in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        x, y = at(0, value).split(",")
        lines.append(f'<line class="grid" x1="{x}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>')
        lines.append(f'<text class="quiet" x="{LEFT - 8}" y="{float(y) + 4}" text-anchor="end">{value}</text>')
    for number in range(0, passes + 1, 5):
        x = at(number, LOW).split(",")[0]
        lines.append(f'<text class="quiet" x="{x}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{number}</text>')
    for row, (name, values) in enumerate(found.items()):
        points = " ".join(at(k, value) for k, value in enumerate(values, start=1))
        lines.append(f'<polyline class="{name}" points="{points}"/>')
        what = {"federated": "federated: three sites, 20 rounds", "centralized": "centralized: the pooled data"}[name]
        lines.append(
            f'<text class="{name}" x="{LEFT + 300}" y="{TOP + 140 + 20 * row}">{what}: {values[-1]:.3f}</text>'
        )
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 300" width="760" height="300" role="img" '
            'font-family="system-ui, sans-serif" font-size="14">',
            "  <title>Accuracy on the test set by passes over the data</title>",
            f"  <style>{STYLE}</style>",
            f'  <text x="{LEFT}" y="24">accuracy on the test set of the task of the README</text>',
            *(f"  {line}" for line in lines),
            f'  <text class="quiet" x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 38}" text-anchor="end">passes over the data '
            "(a round of three sites is one)</text>",
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(curves(Path(sys.argv[1]))), "utf-8")
