"""The statistics that may leave a site under its policy: no small counts, no minima and maxima. Pure.

Every number of examples that leaves is 0 or at least `min_count`:

- a split with fewer examples is omitted, and so is a feature with fewer present, missing or infinite values;
- the small cells of a histogram, and of a task's custom counts, are omitted. The total would reveal a single missing
  cell, so the next smallest cells are omitted, too, until there are two with `min_count` examples together
  (complementary suppression).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from atoll.ground.printable import count_of
from atoll.protocol.disclosure import Disclosure, MetricsLeave
from atoll.training.statistics.parts import Histogram, Moments, Numbers, Part, Place, SiteStatistics


@dataclass(frozen=True, slots=True)
class StatisticsTerms:
    """Terms on which the statistics of a site's data leave it."""

    disclosure: Disclosure = field(default_factory=lambda: Disclosure(MetricsLeave.NONE))
    min_count: int = 10
    extremes: bool = False

    def __str__(self) -> str:
        extremes = "with" if self.extremes else "without"
        return f"statistics {self.disclosure}, counts of at least {self.min_count}, {extremes} extremes"


def guarded(statistics: SiteStatistics, terms: StatisticsTerms) -> SiteStatistics:
    """Return the statistics that may leave, and the reason for everything that is withheld."""
    parts: dict[Place, Part] = {}
    withheld = dict(statistics.withheld)
    small = _small_splits(statistics.parts, terms.min_count)
    for place, part in statistics.parts.items():
        if place[0] in small:
            withheld[place[0], "examples", ""] = small[place[0]]
            continue
        kept = _guarded(part, terms)
        if isinstance(kept, str):
            withheld[place] = kept
        else:
            parts[place] = kept
    return SiteStatistics(
        parts, {place: why for place, why in withheld.items() if place[0] not in small or not place[2]}
    )


def _small_splits(parts: Mapping[Place, Part], least: int) -> dict[str, str]:
    """Return the splits that are withheld as a whole, each with the reason."""
    small = {}
    for split in {place[0] for place in parts} if least > 1 else ():
        number = parts.get((split, "examples", ""))
        if not isinstance(number, Numbers):
            small[split] = "the number of examples is not known"
        elif any(value is None or 0 < value < least for value in number.values):
            small[split] = f"fewer than {count_of(least, 'example')}"
    return small


def _guarded(part: Part, terms: StatisticsTerms) -> Part | str:
    """Return the part of the statistics as it may leave the site, or the reason to withhold it."""
    match part:
        case Moments():
            return _moments(part, terms)
        case Histogram():
            return _histogram(part, terms.min_count)
        case Numbers(merge="min" | "max"):
            return part if terms.extremes else "extremes stay at this site"
        case Numbers(merge="count"):
            kept = set(_kept({str(k): int(v) for k, v in enumerate(part.values) if v is not None}, terms.min_count))
            if not part.shape and "0" not in kept:
                return f"fewer than {count_of(terms.min_count, 'example')}"
            return replace(part, values=tuple(v if str(k) in kept else None for k, v in enumerate(part.values)))
        case _:
            return part


def _moments(part: Moments, terms: StatisticsTerms) -> Moments | str:
    least = terms.min_count
    for number, what in ((part.count, "value"), (part.missing, "missing value"), (part.infinite, "infinite value")):
        if 0 < number < least:
            return f"fewer than {count_of(least, what)}, and more than none"
    return part if terms.extremes else replace(part, least=None, greatest=None)


def _histogram(part: Histogram, least: int) -> Histogram | str:
    kept = set(_kept(part.cells, least))
    if part.cells and not kept:
        return f"no label is left by the least count of {least}"
    cells = {label: number for label, number in part.cells.items() if label in kept}
    return Histogram(cells, part.num_withheld + len(part.cells) - len(cells))


def _kept(cells: Mapping[str, int], least: int) -> Iterator[str]:
    """Yield the cells that may leave: all, or all but the smallest, at least two with `least` examples together."""
    left_out, num_left_out = 0, 0
    is_complete = _is_none_small(cells.values(), least)
    for cell, number in sorted(cells.items(), key=lambda item: (item[1], item[0])):
        is_safe = is_complete or (num_left_out >= 2 and left_out >= least)
        if number == 0 or (number >= least and is_safe):
            yield cell
        else:
            left_out, num_left_out = left_out + number, num_left_out + 1


def _is_none_small(numbers: Iterable[int], least: int) -> bool:
    return not any(0 < number < least for number in numbers)
