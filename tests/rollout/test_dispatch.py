from dynamo_megatron.rollout.dispatch import ExpectedLengths, Load, choose_server, dispatch_order


def test_the_longest_go_first_and_groups_stay_together():
    order = dispatch_order(["a", "b", "a", "c", "b"], [10, 30, 10, 30, 30])
    assert order == [1, 4, 3, 0, 2]
    assert dispatch_order([], []) == []


def test_a_request_goes_where_the_fewest_tokens_are_expected():
    loads = {"s0": Load(1, 500.0), "s1": Load(5, 200.0), "s2": Load(2, 200.0)}
    assert choose_server(loads, capacity=8) == "s1"  # the first of equals
    assert choose_server(loads, capacity=5) == "s2"  # s1 is full
    assert choose_server(loads, capacity=1) is None
    assert choose_server({}, capacity=8) is None


def test_a_group_keeps_its_server_unless_that_unbalances():
    loads = {"s0": Load(4, 400.0), "s1": Load(1, 100.0)}
    assert choose_server(loads, 8, home="s0", group_tokens=300.0) == "s0"
    assert choose_server(loads, 8, home="s0", group_tokens=299.0) == "s1"
    assert choose_server(loads, 4, home="s0", group_tokens=300.0) == "s1"  # full
    assert choose_server(loads, 8, home="gone", group_tokens=300.0) == "s1"


def test_expected_lengths_are_the_prompts_own_then_everybodys():
    lengths = ExpectedLengths(1000.0)
    assert lengths("new") == 1000
    lengths.observe("a", 100)
    lengths.observe("b", 300)
    assert lengths("a") == 100 and lengths("new") == 200
    lengths.observe("a", 200)
    assert lengths("a") == 150
