import json

from benchmarks.report import Bar, conclude, percentile, spread


def test_last_line_is_one_json_object(capsys):
    assert conclude("it", [Bar.below("x", 1.0, 2.0)], ours={"a": 1}, theirs=None, why_not="nobody is there") == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(document) == ["name", "bars", "ok", "ours", "theirs", "machine"]
    assert document["bars"] == [{"name": "x", "value": 1.0, "bar": "< 2", "ok": True}]
    assert document["theirs"] == "not measured: nobody is there"


def test_one_missed_bar_is_not_ok(capsys):
    bars = [Bar.below("x", 2.0, 2.0), Bar.at_most("y", 2.0, 2.0), Bar.exactly("z", 1, 1)]
    assert [bar.ok for bar in bars] == [False, True, True]
    conclude("it", bars, ours={}, theirs={})
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_percentile_is_a_value_that_was_measured():
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0


def test_spread_has_median_and_extremes():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
