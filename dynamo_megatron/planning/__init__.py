"""`dynamo-megatron plan`: estimates the memory and time that a run will need, by arithmetic, without ranks or a GPU."""
