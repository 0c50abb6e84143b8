"""The papers' synthetic experiments, listed in runner.py and run by scripts/reproduce.py."""
