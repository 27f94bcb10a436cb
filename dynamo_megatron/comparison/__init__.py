"""`dynamo-megatron compare`: arms x seeds x learning rates of one task, and what it took them to reach a target."""
