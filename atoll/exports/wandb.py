"""The export as an offline run of Weights & Biases, which `wandb sync` uploads when its owner wants that.

The package `wandb` (the extra of the same name) has the messages. Its writer would start a service and keep rows in
memory, so that a killed export loses some and a resumed one begins a second file: this one appends to one file.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # before the import: an export sends nothing

from wandb.proto import wandb_internal_pb2

from atoll.exports.record_file import InRecords, RecordFile
from atoll.exports.rows import About, Row, State
from atoll.exports.wandb_file import HEADER, framed, read_records
from atoll.protocol.json_values import plain

pb: Any = wandb_internal_pb2  # its types depend on the release of protobuf

ITS_OWN = ("_step", "_timestamp", "_runtime")


class WeightsAndBiases(InRecords):
    """The destination `wandb` of an export: an offline run of Weights & Biases.

    Args:
        folder: the folder of offline runs, as `wandb` calls it in a project.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._config: dict[str, str] = {}
        self._summary: dict[str, str] = {}
        self._axes: dict[str, str] = {}
        self._num_rows = self._num_records = 0
        self._begun_at, self._newest_at = 0.0, 0.0

    def begin(self, about: About) -> None:
        """Open the run's file and read which rows it has."""
        path = self._path(about)
        self._opened, self.place = RecordFile(path, read_records, framed, HEADER), str(path.parent)
        records = [pb.Record.FromString(record) for record in self._file.records]
        if records and records[-1].WhichOneof("record_type") == "exit":
            self._file.remove_last()  # the run may have continued
            records.pop()
        self._num_records, self._begun_at = len(records), about.created_at
        for record in records:
            self._note(record)
        self._file.forget()
        config = {key: json.dumps(plain(value)) for key, value in about.settings.items()}
        if not records:
            self._append([_header(), _run(about, config)])
        elif changed := {key: text for key, text in config.items() if self._config.get(key) != text}:
            self._append([pb.Record(config=pb.ConfigRecord(update=_items(pb.ConfigItem, changed)))])

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows, each as one step of the history; a metric's axis is that of its first row."""
        self._append(record for row in rows for record in self._records(row))

    def state(self, state: State) -> None:
        """Append the state and the facts to the summary if they differ, and the end of a run that has ended."""
        facts = {key: json.dumps(value) for key, value in state.document().items()}
        changed = {key: text for key, text in facts.items() if self._summary.get(key) != text}
        self._append([pb.Record(summary=pb.SummaryRecord(update=_items(pb.SummaryItem, changed)))] if changed else [])
        self._summary |= changed
        if state.has_ended:
            runtime = max(0, int(self._newest_at - self._begun_at))
            self._append([pb.Record(exit=pb.RunExitRecord(exit_code=int(state.has_failed), runtime=runtime))])

    def _path(self, about: About) -> Path:
        """Return the file of the run; the time in its folder's name is that of the first export."""
        for folder in sorted(self._folder.glob(f"offline-run-*-{about.id}")):
            return folder / f"run-{about.id}.wandb"
        begun = time.strftime("%Y%m%d_%H%M%S", time.localtime(about.created_at))
        folder = self._folder / f"offline-run-{begun}-{about.id}"
        (folder / "files").mkdir(parents=True, exist_ok=True)
        return folder / f"run-{about.id}.wandb"

    def _append(self, records: Iterable[Any]) -> None:
        numbered = []
        for record in records:
            self._num_records += 1
            record.num = self._num_records
            numbered.append(record.SerializeToString())
        self._file.append(numbered)

    def _records(self, row: Row) -> Iterator[Any]:
        for name in row.values:
            if name not in self._axes:
                self._axes[name] = row.axis
                options = pb.MetricOptions(step_sync=True, defined=True)
                yield pb.Record(metric=pb.MetricRecord(name=name, step_metric=row.axis, options=options))
        own = (self._num_rows, row.at, row.at - self._begun_at)
        values = {**row.values, row.axis: row.step, **dict(zip(ITS_OWN, own, strict=True))}
        texts = {name: json.dumps(value) for name, value in values.items()}
        step = pb.HistoryStep(num=self._num_rows)
        yield pb.Record(summary=pb.SummaryRecord(update=_items(pb.SummaryItem, texts)))
        yield pb.Record(history=pb.HistoryRecord(item=_items(pb.HistoryItem, texts), step=step))
        self._num_rows += 1
        self._newest_at = max(self._newest_at, row.at)
        self._steps.add(next(iter(row.values)), row.step)

    def _note(self, record: Any) -> None:
        """Record which step, settings or state a record of the file has."""
        match record.WhichOneof("record_type"):
            case "run":
                self._config |= {item.key: item.value_json for item in record.run.config.update}
            case "config":
                self._config |= {item.key: item.value_json for item in record.config.update}
            case "summary":
                self._summary |= {_key(item): item.value_json for item in record.summary.update}
            case "metric":
                self._axes[record.metric.name] = record.metric.step_metric
            case "history":
                self._note_row({_key(item): item.value_json for item in record.history.item})

    def _note_row(self, texts: Mapping[str, str]) -> None:
        self._num_rows += 1
        self._newest_at = max(self._newest_at, float(texts["_timestamp"]))
        first = next(iter(texts))
        self._steps.add(first, int(texts[self._axes[first]]))


def _key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def _items(kind: Any, texts: Mapping[str, str]) -> list[Any]:
    """Return the items of a record, with names that are never taken for paths of nested tables."""
    if kind is pb.ConfigItem:
        return [kind(key=key, value_json=text) for key, text in texts.items()]
    return [kind(nested_key=[key], value_json=text) for key, text in texts.items()]


def _header() -> Any:
    from wandb import __version__

    info = pb.VersionInfo(producer=__version__, min_consumer="0.70.0")
    return pb.Record(header=pb.HeaderRecord(version_info=info))


def _run(about: About, config: Mapping[str, str]) -> Any:
    run = pb.RunRecord(run_id=about.id, project=about.group, run_group=about.group, display_name=about.name)
    run.config.update.extend(_items(pb.ConfigItem, config))
    run.start_time.FromNanoseconds(int(about.created_at * 1e9))
    return pb.Record(run=run)
