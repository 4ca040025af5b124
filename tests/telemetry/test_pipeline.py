"""The text of readings for Prometheus, read by Prometheus's own parser."""

from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from atoll.telemetry.instruments import BY_NAME, INSTRUMENTS, Attributes, Buckets, Kind, Reading
from atoll.telemetry.pipeline import Pipeline, ReadingFailed


def reading_of_all() -> Reading:
    """Return a reading with two series of each instrument."""
    found: Reading = {}
    for instrument in INSTRUMENTS:
        for n in (1, 2):
            of: Attributes = {attribute: f"{attribute} {n}" for attribute in instrument.attributes}
            value: float | Buckets = n * 1.5
            if instrument.kind is Kind.HISTOGRAM:
                value = Buckets(instrument.bounds)
                value.add(instrument.bounds[0])
                value.add(1e9)
            found.setdefault(instrument.name, []).append((of, value))
    return found


def text_of(reading: Reading) -> str:
    pipeline = Pipeline("atoll.coordinator", "one", lambda: reading)
    try:
        return generate_latest(pipeline.registry).decode()
    finally:
        pipeline.close()


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, dict(sample.labels), sample.value


def test_each_instrument_has_the_name_and_labels_of_the_list() -> None:
    found = list(samples(text_of(reading_of_all())))
    for instrument in INSTRUMENTS:
        suffix = "_count" if instrument.kind is Kind.HISTOGRAM else ""
        series = [labels for name, labels, _ in found if name == instrument.in_prometheus + suffix]
        expected = {attribute.replace(".", "_") for attribute in instrument.attributes}
        assert series, instrument.in_prometheus
        assert all(set(labels) == expected for labels in series)
    known = {instrument.in_prometheus for instrument in INSTRUMENTS} | {"target_info"}
    ends = ("_bucket", "_sum", "_count")
    assert {
        name if name in known else name.removesuffix(next(filter(name.endswith, ends))) for name, _, _ in found
    } == known


def test_a_histogram_is_cumulative() -> None:
    of = Buckets((1.0, 10.0))
    for value in (0.5, 1.0, 5.0, 50.0, 60.0):
        of.add(value)
    reading: Reading = {"atoll.round.duration": [({"atoll.run.id": "r-1"}, of)]}
    found = {(name, labels.get("le")): value for name, labels, value in samples(text_of(reading))}
    name = BY_NAME["atoll.round.duration"].in_prometheus
    assert [found[f"{name}_bucket", le] for le in ("1.0", "10.0", "+Inf")] == [2, 3, 5]
    assert (found[f"{name}_count", None], found[f"{name}_sum", None]) == (5, 116.5)


def test_a_series_ends_with_what_it_is_of() -> None:
    reading: Reading = {"atoll.run.state": [({"atoll.run.id": "r-1", "atoll.run.state": "running"}, 1)]}
    pipeline = Pipeline("atoll.coordinator", "one", lambda: reading)
    assert 'atoll_run_state="running"' in generate_latest(pipeline.registry).decode()
    reading["atoll.run.state"] = [({"atoll.run.id": "r-1", "atoll.run.state": "paused"}, 1)]
    second = generate_latest(pipeline.registry).decode()
    pipeline.close()
    assert 'atoll_run_state="paused"' in second
    assert "running" not in second


@pytest.mark.parametrize("name", ['<script>"', "a\nb", "\\", "‮" * 64, "\0", "🦑"])
def test_hostile_names_stay_one_label(name: str) -> None:
    of = {"atoll.run.id": "r-1", "atoll.metric.source": "clients", "atoll.metric.name": name}
    values = [float("nan"), float("inf")]
    found = list(
        samples(text_of({"atoll.metric.value": [(of, values[0]), ({**of, "atoll.run.id": "r-2"}, values[1])]}))
    )
    assert [labels["atoll_metric_name"] for metric, labels, _ in found if metric == "atoll_metric_value"] == [name] * 2


def test_a_process_that_does_not_answer_fails_the_scrape() -> None:
    def read() -> Reading:
        raise ReadingFailed("no reading: the process ends")

    pipeline = Pipeline("atoll.coordinator", "one", read)
    with pytest.raises(ReadingFailed, match="the process ends"):
        generate_latest(pipeline.registry)
    pipeline.close()
