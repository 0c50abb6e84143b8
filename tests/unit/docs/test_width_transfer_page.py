"""docs/width_transfer.md: commands are understood, stars and verdicts follow the losses."""

import re
import shlex

from scripts.sweep_width import parse, read_sweep
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "width_transfer.md").read_text()
TABLES, VERDICTS = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)


def test_every_command_is_understood():
    commands = re.findall(r"^    python scripts/sweep_width.py (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        read_sweep(ROOT / parse(shlex.split(command)).sweep)


def test_the_page_has_the_preset_and_says_what_its_numbers_say():
    sweep, later = (
        read_sweep(ROOT / "studies" / "widths" / f"{name}.yaml")
        for name in ("tiny", "muon_plus_plus_tiny")
    )
    optimizers = sweep.optimizers | later.optimizers
    assert (sweep.overrides, sweep.widths) == (later.overrides, later.widths)
    found = {}
    for table in TABLES.strip().split("\n\n"):
        head, *rows = (re.split(r"\s{2,}", line.strip()) for line in table.splitlines())
        name, rates = head[0], [float(rate) for rate in head[1:]]
        assert rates == optimizers[name].rates
        best = {}
        for width, *cells in rows:
            losses = [float(cell.rstrip("*")) for cell in cells]
            starred = [i for i, cell in enumerate(cells) if cell.endswith("*")]
            assert [losses[i] for i in starred] == [min(losses)]
            best[int(width)] = rates[starred[0]]
        assert list(best) == sweep.widths
        found[name] = best
    assert found.keys() == optimizers.keys()
    for line in VERDICTS.strip().splitlines():
        name, verdict = line.split(": best rate ")
        places = ", ".join(f"{rate:g} at {width}" for width, rate in found[name].items())
        same = len(set(found[name].values())) == 1
        assert verdict == f"{'the same' if same else 'NOT the same'}: {places}"
    assert len(set(found["SSO"].values())) == 1
    assert "SSO's best learning rate is the same grid point, 0.08" in PAGE
