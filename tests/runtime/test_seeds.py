from dynamo_megatron.config import Config
from dynamo_megatron.rollout.servers.supervisor import seed_arguments
from dynamo_megatron.runtime.seeds import derived_seed


def test_seeds_stay_the_same_for_ever():
    """Else a run that is resumed with a later version samples otherwise."""
    assert derived_seed(0, "rollout", "000001-0000-000") == 457580061066140409
    drawn = {derived_seed(seed, *names) for seed in (0, 1) for names in (("a", "b"), ("a/b",), ("a",), ("b", "a"))}
    assert len(drawn) == 8 and all(0 <= seed < 2**63 for seed in drawn)
    derived_seed(0, "half \ud800 a pair")  # as a prompt id of the data may be


def test_every_server_has_a_seed_of_its_own():
    def arguments(name, **keys):
        config = Config(model={"path": "m"}, data={"source": "s"}, output_dir="o", **keys)
        option, seed = seed_arguments(config, name)  # and on a CPU no mode that has no CPU kernels
        assert option == "--random-seed" and 0 <= int(seed) < 2**31
        return seed

    assert arguments("server-0") == arguments("server-0", trainer={"deterministic": True})
    assert len({arguments("server-0"), arguments("server-1"), arguments("server-0", seed=1)}) == 3
