"""Statistics of the sites' data in sentences and tables, as `atoll run statistics` prints them."""

from atoll.operations.statistics_tables import Part, Rows, Split, headline, parts_of

__all__ = ["Part", "Rows", "Split", "headline", "parts_of"]
