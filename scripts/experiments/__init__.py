"""The papers' synthetic experiments, one per file; scripts/reproduce.py runs them."""
