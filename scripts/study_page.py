"""Writes what docs/results.md and README.md say of optimizers from the committed results.

python scripts/study_page.py            # both pages, and figures in docs/images
python scripts/study_page.py --check    # 1 if a page is not what the results say
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.command import command
from scripts.studies.evidence import Evidence
from scripts.studies.page import SMALL, insert, read_all, readme, section


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code."""
    options = parse(arguments)
    studies = read_all(options.studies)
    made = {
        options.docs / "results.md": section(studies),
        options.docs.parent / "README.md": readme(studies),
    }
    same = True
    for path, text in made.items():
        old = path.read_text(encoding="utf-8")
        new = insert(old, text)
        same = same and old == new
        if not options.check:
            path.write_text(new, encoding="utf-8")
    if options.check:
        return int(not same)
    for path in draw(studies, options.docs / "images"):
        print(f"wrote {path}")
    return 0


def draw(studies: dict[str, Evidence], folder: Path) -> list[Path]:
    """The figures for which there are results."""
    from scripts.plots.optimizers import plot_courses, plot_rates
    from scripts.plots.style import save

    small, paths = studies[SMALL], []
    folder.mkdir(parents=True, exist_ok=True)
    if small.trials:
        paths.append(folder / "optimizers_rates.svg")
        save(plot_rates(small), paths[-1])
    if small.rows:
        paths.append(folder / "optimizers_courses.svg")
        save(plot_courses(small), paths[-1])
    return paths


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, compare the pages")
    parser.add_argument(
        "--studies", type=Path, default=ROOT / "studies/optimizers", help="studies and results/"
    )
    parser.add_argument(
        "--docs", type=Path, default=ROOT / "docs", help="folder of results.md, beside README.md"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
