"""The parts of scripts/study.py: what a study is, its runs, its search and its comparison."""
