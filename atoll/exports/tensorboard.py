"""The export as TensorBoard's event file: scalars, with settings and state as text, and settings as hparams.

The package `tensorboard` (the extra of the same name) has the format; nothing of torch is imported.
"""

import io
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter, masked_crc32c

from atoll.exports.destination import ExportRefused
from atoll.exports.record_file import InRecords, RecordFile
from atoll.exports.rows import About, Row, State
from atoll.protocol.json_values import plain

VERSION, WRITER = "brain.Event:2", "atoll "
HPARAMS = "_hparams_/session_start_info"
HEAD = struct.Struct("<QI")
"""The length of a record and the checksum of the length; behind the record comes a checksum of four bytes."""


class TensorBoard(InRecords):
    """The destination `tensorboard` of an export: an event file.

    Args:
        folder: the log directory, in which each run has a folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._texts: dict[str, tuple[int, str]] = {}

    def begin(self, about: About) -> None:
        """Open the event file and read which rows it has."""
        path = self._folder / about.name / "events.out.tfevents.atoll"
        self._opened, self.place = RecordFile(path, read_records, framed), str(path.parent)
        events = [Event.FromString(record) for record in self._file.records]
        writer = WRITER + about.id
        if events and events[0].source_metadata.writer != writer:
            raise ExportRefused(
                f"{path.parent}: holds another run: choose another place with --to, or delete the folder"
            )
        for event in events:
            self._note(event)
        self._file.forget()
        if not events:
            first = Event(wall_time=about.created_at, file_version=VERSION)
            first.source_metadata.writer = writer
            self._file.append([first.SerializeToString()])
        settings = {key: plain(value) for key, value in about.settings.items()}
        self._text("settings", _as_table(settings), about.created_at, hparams=settings)

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows, each as one event."""
        self._file.append(
            Event(
                wall_time=row.at,
                step=row.step,
                summary=Summary(
                    value=[Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
                ),
            ).SerializeToString()
            for row in rows
        )
        for row in rows:
            self._steps.add(next(iter(row.values)), row.step)

    def state(self, state: State) -> None:
        """Append the state as a text, if it differs from the last one."""
        self._text("state", _as_table(state.document()), 0.0)

    def _note(self, event: Event) -> None:
        for value in event.summary.value[:1]:
            if value.metadata.plugin_data.plugin_name == "text":
                self._texts[value.tag] = (event.step, value.tensor.string_val[0].decode())
            else:
                self._steps.add(value.tag, event.step)

    def _text(self, tag: str, text: str, at: float, hparams: Mapping[str, Any] | None = None) -> None:
        """Append a text, and settings for the plugin of hyperparameters, if it differs from the last one of its tag."""
        step, last = self._texts.get(tag, (-1, ""))
        if text == last:
            return
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        values = [Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]
        if hparams is not None:
            values.append(Summary.Value(tag=HPARAMS, metadata=_hparams(hparams)))
        event = Event(wall_time=at, step=step + 1, summary=Summary(value=values))
        self._file.append([event.SerializeToString()])
        self._texts[tag] = (step + 1, text)


def _as_table(values: Mapping[str, Any]) -> str:
    """Return settings as a table in Markdown, as TensorBoard shows texts."""
    lines = [f"| {key} | {_text_of(value)} |" for key, value in values.items()]
    return "\n".join(["| key | value |", "| --- | --- |", *lines])


def _text_of(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text.split()).replace("|", "\\|")


def _hparams(settings: Mapping[str, Any]) -> SummaryMetadata:
    """Return the settings in the form of TensorBoard's plugin `hparams`."""
    start = plugin_data_pb2.SessionStartInfo()
    for key, value in settings.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
        elif value is not None:
            start.hparams[key].string_value = _text_of(value)
    content = plugin_data_pb2.HParamsPluginData(session_start_info=start, version=0).SerializeToString()
    return SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="hparams", content=content))


def framed(record: bytes, _place: int) -> bytes:
    """Return a record in the form of TensorBoard's files."""
    file = io.BytesIO()
    RecordWriter(file).write(record)
    return file.getvalue()


def read_records(content: bytes) -> tuple[list[bytes], list[int]]:
    """Return the whole records of an event file, and the end of each."""
    records, ends, at = [], [], 0
    while at + HEAD.size <= len(content):
        length, checksum = HEAD.unpack_from(content, at)
        end = at + HEAD.size + length + 4
        if end > len(content) or checksum != masked_crc32c(content[at : at + 8]):
            break
        records.append(content[at + HEAD.size : end - 4])
        ends.append(end)
        at = end
    return records, ends
