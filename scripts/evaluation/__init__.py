"""Evaluation of exported models with lm-eval: what scripts/evaluate.py is made of."""
