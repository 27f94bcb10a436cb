import beside_trl

from dynamo_megatron.config.files import compose


def test_ours_does_the_work_that_trl_does(tmp_path):
    job = {**beside_trl.WORK, "seed": 1}
    given = beside_trl.words(job, 1, tmp_path)
    config, _ = compose([str(beside_trl.ROOT / word) for word in beside_trl.DEMO], given[2:])
    rollouts = job["prompts"] * beside_trl.GROUP
    assert config.rollout_budget == rollouts and rollouts % job["size"] == 0
    assert (config.model.path, config.optimizer.lr, config.rollout.max_new_tokens) == (job["model"], job["lr"], 6)
    assert config.optimizer.weight_decay == 0 and config.optimizer.warmup_steps == 2
    assert config.algorithm.allocation.kind == "uniform" and config.algorithm.kl.coef == 0
    assert config.algorithm.loss.aggregation == "token_mean" and config.algorithm.loss.mini_batches == 1
    assert not config.algorithm.measures_first and config.reward.functions == ["math"]
