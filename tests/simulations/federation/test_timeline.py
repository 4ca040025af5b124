from atoll.simulations.federation.timeline import DeadlineTimer, Timeline


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


def test_a_timer_fires_once_at_a_deadline_that_has_moved_in_both_directions():
    timeline, deadlines, fired = Timeline(), [9.0], []
    timer = DeadlineTimer(timeline, lambda: deadlines[-1], lambda: fired.append(timeline.now) or deadlines.append(None))
    timer.arm()
    for deadline in (4.0, 7.0):  # earlier, and later again while the timer of 4.0 is planned
        deadlines.append(deadline)
        timer.arm()
    while timeline.step():
        pass
    assert fired == [7.0]
