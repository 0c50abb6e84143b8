"""The benchmark of checkpoints saves a whole trainer in every way and removes what it wrote."""

import json
from pathlib import Path

from scripts.bench.checkpoint import main
from tests.run_configs import tiny_config


def test_saves_are_measured_and_removed(tmp_path: Path) -> None:
    tiny_config(str(tmp_path))
    folder, out = tmp_path / "saves", tmp_path / "out.json"
    folder.mkdir()
    options = ["--repeats", "1", "--folder", str(folder), "--json", str(out)]
    assert main(["--config", f"{tmp_path}/config.yaml", *options]) == 0
    found = json.loads(out.read_text())
    assert all(found[name] > 0 for name in ("mib", "copy", "background", "blocking"))
    assert list(folder.iterdir()) == []
