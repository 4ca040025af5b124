"""The following of a run from its journal, by any process: a reader of new entries, and the items that they yield."""
