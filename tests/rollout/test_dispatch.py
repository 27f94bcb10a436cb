from dynamo_megatron.rollout.dispatch import Siblings, choose_server


def test_a_request_goes_where_the_fewest_are_under_way():
    loads = {"s0": 5, "s1": 2, "s2": 2}
    assert choose_server(loads, 8, Siblings(1)) == "s1"  # the first of equals
    assert choose_server(loads, 2, Siblings(1)) is None
    assert choose_server({}, 8, Siblings(1)) is None


def test_a_group_keeps_its_server_unless_that_unbalances():
    loads = {"s0": 4, "s1": 1}
    assert choose_server(loads, 8, Siblings(3, "s0")) == "s0"
    assert choose_server(loads, 8, Siblings(2, "s0")) == "s1"
    assert choose_server(loads, 4, Siblings(3, "s0")) == "s1"  # full
    assert choose_server(loads, 8, Siblings(3, "gone")) == "s1"
