from tests.benchmarks.test_quick import measure


def test_codecs_are_measured_beside_plain_torch():
    document = measure("codecs", "--chunks", "2", "--pairs", "1", "--names", "sign", "topk:0.01")
    assert [bar["ok"] for bar in document["bars"] if "GB/s" not in bar["name"]] == [True] * 4
    for name in ("sign", "topk:0.01"):
        ours, theirs = document["ours"]["codecs"][name], document["theirs"]["codecs"][name]
        assert abs(ours["relative_error"] - theirs["relative_error"]) < 1e-5
