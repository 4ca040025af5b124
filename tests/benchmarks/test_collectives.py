from tests.benchmarks.test_quick import measure


def test_collectives_by_hand_send_what_theory_says_and_give_what_gloo_gives():
    document = measure("collectives", "--ranks", "3", "--pairs", "1", "--kib", "3")
    assert len(document["bars"]) == 10
    assert document["ok"]
    assert document["ours"]["by_hand"].keys() == document["theirs"]["gloo"].keys()
