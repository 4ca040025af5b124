"""The export as a file of JSON, an object a line: `run`, then `settings`, `row` and `state` as they come."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.exports.destination import ExportRefused
from atoll.exports.record_file import InRecords, RecordFile
from atoll.exports.rows import About, Row, State
from atoll.protocol.json_values import plain
from atoll.task.json_text import to_json


class JsonLines(InRecords):
    """The destination `jsonl` of an export: a file of JSON lines.

    Args:
        folder: the folder of the file, which is called NAME.jsonl.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._last: dict[str, Any] = {}

    def begin(self, about: About) -> None:
        """Open the file and read which rows it has."""
        path = self._folder / f"{about.name}.jsonl"
        self._opened, self.place = RecordFile(path, lines, lambda record, _: record + b"\n"), str(path)
        documents = [json.loads(record) for record in self._file.records]
        if documents and documents[0].get("id") != about.id:
            raise ExportRefused(f"{path}: holds another run: choose another place with --to, or delete the file")
        for document in documents:
            if document["kind"] == "row":
                self._steps.add(next(iter(document["values"]), ""), document["step"])
            else:
                self._last[document["kind"]] = document
        self._file.forget()
        head = {"kind": "run", "id": about.id, "name": about.name, "group": about.group, "at": about.created_at}
        self._write_news([head] if not documents else [], {"kind": "settings", "values": plain(dict(about.settings))})

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows, a line each."""
        self._file.append(
            to_json(
                {"kind": "row", row.axis: row.step, "step": row.step, "at": row.at, "values": dict(row.values)}
            ).encode()
            for row in rows
        )
        for row in rows:
            self._steps.add(next(iter(row.values)), row.step)

    def state(self, state: State) -> None:
        """Append the state, if it differs from the last one."""
        self._write_news([], {"kind": "state", **state.document()})

    def _write_news(self, before: list[dict[str, Any]], document: dict[str, Any]) -> None:
        """Append the documents `before`, and `document` if it differs from the last one of its kind."""
        text = to_json(document, ensure_ascii=False)
        is_news = json.loads(text) != self._last.get(document["kind"])
        self._file.append(to_json(each, ensure_ascii=False).encode() for each in before)
        if is_news:
            self._file.append([text.encode()])
            self._last[document["kind"]] = json.loads(text)


def lines(content: bytes) -> tuple[list[bytes], list[int]]:
    """Return the whole lines of a file of JSON, and the end of each."""
    records, ends, at = [], [], 0
    for line in content.splitlines(keepends=True):
        at += len(line)
        if not line.endswith(b"\n"):
            break
        records.append(line.rstrip(b"\n"))
        ends.append(at)
    return records, ends
