"""Evaluation: what sampled responses to held-out problems say, and how surely."""
