"""Custom statistics of a task's data, before any training. Importing this imports no torch.

def ages(data, split):
    return {"age": data.ages.sum(), "age_groups": Statistic(np.bincount(data.groups, minlength=8), merge="count")}

task = Task(..., statistics=ages)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Statistic:
    """A number or an array of numbers of one split of a site's data, and the rule by which sites are merged."""

    value: Any
    """A number, or an array of any library that numpy reads."""

    merge: Literal["sum", "count", "min", "max"] = "sum"
    """"sum" adds exactly. "count" is a sum of numbers of examples: a site's policy may leave out small ones
    (`statistics_min_count`). "min" and "max" leave a site only if its policy allows extremes."""


Statistics = Mapping[str, Statistic | Any]
"""The result of a task's `statistics`: by name a `Statistic`, or a number or an array, which is added."""
