"""What starting does not import, as it takes longer than all the rest."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spectral.constant_result import constant_result

LOADED = "import sys; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
HELP = """
import contextlib, io, sys
import pretrain
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    pretrain.main(["--help"])
"""


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("from spectral import Muon, SpectralSphere\n", ["True", "False"]),
        (HELP, ["False", "False"]),
    ],
)
def test_the_compiler_is_not_imported(root: Path, code: str, loaded: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code + LOADED], cwd=root, capture_output=True, text=True
    )
    assert done.stdout.split() == loaded, done.stderr


def test_a_constant_result_is_marked_as_torch_marks_it() -> None:
    def one() -> int:
        return 1

    def two() -> int:
        return 1

    assert constant_result(one) is one
    assert vars(one) == vars(torch.compiler.assume_constant_result(two)) != {}
