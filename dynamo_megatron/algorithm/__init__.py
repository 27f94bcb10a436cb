"""The mathematics: allocation, advantages, modulation, losses, aggregation. On numpy or torch, without I/O."""
