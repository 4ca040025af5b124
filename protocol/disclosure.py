"""The disclosure of a site's metrics: what the site allows the coordinator to keep and to show. Pure values."""

from dataclasses import dataclass
from enum import StrEnum

from atoll.ground.printable import count_of


class MetricsLeave(StrEnum):
    """Form in which the sums of a site's metrics leave it."""

    PER_SITE = "per_site"
    """Kept and shown for this site alone."""
    MERGED = "merged"
    """Shown only as a part of the sums of several sites."""
    NONE = "none"
    """Kept at the site."""


SITES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Disclosure:
    """Terms on which a site's metrics leave it. An older agent states no terms: `MERGED`, with any number of sites."""

    metrics: MetricsLeave = MetricsLeave.MERGED
    min_sites: int = 0
    """Least number of sites in any sum that is shown with this site's part in it."""

    def __str__(self) -> str:
        if self.metrics is MetricsLeave.NONE or self.min_sites < 2:
            return str(self.metrics)
        return f"{self.metrics}, sums of at least {count_of(self.min_sites, 'site')}"

    @classmethod
    def read(cls, metrics: str, min_sites: int) -> "Disclosure":
        """Return the terms that a message states; unknown words allow no more than merged sums."""
        known = MetricsLeave(metrics) if metrics in set(MetricsLeave) else MetricsLeave.MERGED
        return cls(known, min(max(min_sites, 0), SITES_MAX))


ANY_SUM = Disclosure()
"""Terms of a site that states no terms."""
