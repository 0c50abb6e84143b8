"""The papers' synthetic experiments, run by scripts/reproduce.py; one file each."""
