from atoll.simulations.federation.timeline import Timeline


def test_actions_happen_in_the_order_of_their_instants_and_of_one_instant_as_planned():
    timeline, seen = Timeline(5.0), []
    timeline.after(2.0, seen.append, "c")
    timeline.at(6.0, seen.append, "a")
    timeline.at(6.0, seen.append, "b")
    timeline.at(1.0, lambda: seen.append(("past", timeline.now)))
    while timeline.step():
        pass
    assert seen == [("past", 5.0), "a", "b", "c"]
    assert timeline.now == 7.0
