"""Four CSV files of scikit-learn's breast cancer data, with one value in twenty missing: `python make_csv.py DIR`."""

import csv
import random
import sys
from pathlib import Path

from sklearn.datasets import load_breast_cancer

NAMES = ("radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity", "symmetry")
SIZES = {"north": 260, "south": 160, "east": 95, "west": 54}
MISSING = 0.05


def main(folder: Path) -> None:
    """Deal the 569 patients, in a random order, to the hospitals."""
    found = load_breast_cancer()
    columns, benign = [list(found.feature_names).index(f"mean {name}") for name in NAMES], found.target
    rng = random.Random(0)
    patients = rng.sample(range(len(benign)), len(benign))
    for site, size in SIZES.items():
        with (folder / f"{site}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*NAMES, "malignant"])
            for patient in patients[:size]:
                measures = found.data[patient][columns]
                values = ["" if rng.random() < MISSING else value for value in measures]
                writer.writerow([*values, 1 - benign[patient]])
        del patients[:size]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
