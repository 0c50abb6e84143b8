#!/usr/bin/env python
"""Make the picture of a run's page in README, with Chromium.

scripts/picture.py runs/tiny_sso docs/images/run_page.png
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))  # run from any folder, installed or not

from scripts.command import command, require
from training.errors import InputError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COLORS = 64
"""Colours of the picture, which keep the file small."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture."""
    options = parse(arguments)
    require("PIL")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise InputError("no Chromium is installed: apt-get install chromium")
    from scripts.plots.report import report
    from scripts.plots.run_data import read_run

    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "picture.png"
        page.write_text(report(read_run(options.run)), encoding="utf-8")
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--window-size=1200,900", f"--user-data-dir={folder}/profile",
             f"--screenshot={picture}", page.as_uri()],
            check=True, capture_output=True,
        )  # fmt: skip
        shrink(picture, options.output)
    print(f"wrote {options.output}: {options.output.stat().st_size / 1000:.0f} kB")
    return 0


def shrink(source: Path, target: Path) -> None:
    """Save a picture at two thirds of its width with few colours."""
    from PIL import Image

    with Image.open(source) as image:
        small = image.convert("RGB").resize((image.width * 2 // 3, image.height * 2 // 3))
        small.quantize(COLORS, dither=Image.Dither.NONE).save(target, optimize=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Make a picture of a run's page with Chromium.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("output", type=Path, metavar="FILE", help="the picture, .png")
    options = parser.parse_args(arguments)
    if options.output.suffix != ".png":
        parser.error(f"FILE must end in .png, got {options.output}")
    return options


if __name__ == "__main__":
    sys.exit(main())
