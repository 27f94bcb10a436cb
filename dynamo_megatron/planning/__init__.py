"""What a run will need, before anything runs: `dynamo-megatron plan`. Arithmetic alone, without ranks or a GPU."""
