"""The papers' synthetic experiments that scripts/reproduce.py runs, a file each."""
