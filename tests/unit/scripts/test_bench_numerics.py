"""The benchmark of 16-bit numerics says what docs/numerics.md reports."""

from scripts.bench import numerics
from tests.paths import ROOT


def test_the_page_holds_on_recorded_momenta() -> None:
    """What docs/numerics.md recommends, on the recorded wide momenta: eight steps in float16 are
    tangent and near the polar factor; bfloat16 is tangent only, and five steps are not near it.
    """
    stacks = [s for s in numerics.recorded(ROOT / "tests/data/momenta.safetensors") if len(s.m) < 8]
    assert [s.m.shape for s in stacks] == [(4, 128, 256)]
    row = {
        (steps, dtype): numerics.measure(stacks, "polar_express", steps, dtype)
        for steps, dtype in [(8, "float16"), (8, "float32"), (8, "bfloat16"), (5, "float32")]
    }
    assert max(row[8, "float16"].f[1], row[8, "bfloat16"].f[1]) < 1e-6
    assert row[8, "float32"].f[1] < numerics.TOLERANCE
    assert row[8, "float32"].polar[1] < 1e-4 < row[8, "float16"].polar[0] < 1e-2
    assert row[8, "bfloat16"].polar[0] > 1e-2 and row[5, "float32"].polar[0] > 3e-2
    cells = numerics.cells(row[8, "float16"])
    assert len(cells) == len(numerics.COLUMNS) and cells[0] == "8 polar_express, float16"
