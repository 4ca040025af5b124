"""The read-only views of a run for people: history, sentences, reasons, narration."""
