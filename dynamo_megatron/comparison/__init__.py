"""`dynamo-megatron compare`: arms x seeds x learning rates on one task, and their costs to reach a target."""
