"""Repeats the papers' synthetic experiments and says which of their numbers hold.

python scripts/reproduce.py
python scripts/reproduce.py relu_features pi_bound --output runs/reproduce --format png
python scripts/reproduce.py --list

Each writes NAME.json (figures, what was expected, settings, versions, data) and a plot;
results.json and table.md hold the checks of the whole folder. The exit status is 1 if one failed.
See docs/reproduce.md.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from training.errors import print_error  # noqa: E402

if __name__ == "__main__":
    try:
        from scripts.reproduce.command import main
    except ImportError as error:
        print_error(f"{error}: install the extra `plot`")
        sys.exit(2)
    sys.exit(main())
