"""Evaluation: pass@k of sampled responses to held-out problems, with intervals."""
