"""Ways to start the ranks: each only sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
