"""Tasks with code beside them."""

from pathlib import Path

TASKS = str(Path(__file__).parent / "shapes_task.py")
