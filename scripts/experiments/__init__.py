"""The papers' synthetic experiments. scripts/reproduce.py runs them. runner.py lists them."""
