"""The parts of scripts/study.py: a study's description, runs, search and comparison."""
