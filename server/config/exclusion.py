"""The sentence of a setting that a table of the run excludes."""

__all__ = ["excluded", "shown"]


def excluded(table: str, key: str, value: object, why: str, allowed: str) -> str:
    """Return the sentence of one fault, with the value; `; ` would part it into two lines."""
    return f"{key}: got {shown(value)}, and with [{table}] {why}: allowed is {allowed}"


def shown(value: object) -> str:
    """Return a value as a TOML file has it."""
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value}"
