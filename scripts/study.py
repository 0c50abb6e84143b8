"""Tune the variants of a study at equal cost, run them with several seeds and compare them.

    python scripts/study.py studies/sso/radius.yaml runs/studies/radius
    python scripts/study.py studies/sso/radius.yaml runs/studies/radius --jobs 2 train.steps=50

A study is a YAML file: `title`, `seeds`, `overrides` for every run, and `variants` by name, each
with a `config`, its own `overrides` and the variant it is compared `against`. Each run is a process
of `pretrain.py` with one thread and the `environment` of the study, and with the ranks of `--nproc`
or `--gpus-per-run`. A finished run is not repeated, even without its folder: runs.jsonl stores its
figures with its settings. A study whose data or environment has changed is refused. The same
command therefore continues an interrupted study. Several processes with the same command, started
by hand or as a SLURM array (scripts/slurm/study.sbatch), share the runs. results.json and table.md
appear next to runs.jsonl at the end; results.json also after each part, with `complete: false`.

The figure of a run is its last validation loss (nats per token), the mean over its validation sets.
A seed sets both the initial weights and the order of the data. Variants are compared seed by seed,
with Student's 95% interval over the seeds: `level` if the whole interval is within `level_within`
(0.02 nats) of 0, `cannot tell` if a wider interval contains 0. A run with a nonfinite loss counts
as failed, and so does its variant. A variant whose chosen setting is at an end of its grid is
`refused`. Other keys in which a variant differs from its reference, neither tuned nor in
`overrides` or `differs`, are listed at the start and in table.md.

With `search`, every variant is tuned first, by successive halving with the seed of the search: the
candidates of a stage are trained for a `share` of the length `full`, then the best `keep` of them
for the next share. The next stage starts from the best candidate of this stage. A study that tunes
variants at different cost is refused. With `tuned_in`, variants start from the choices of another
study. A width sweep is a study whose variants are widths and whose only stage is a grid of learning
rates.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.command import command, new_parser, whole_number
from training.report.progress import progress


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study and return the exit code."""
    options = parse(arguments)
    # Imported here, as these modules load torch and pandas.
    from scripts.studies.description import read_study
    from scripts.studies.records import RecordBook
    from scripts.studies.running import run_study
    from scripts.studies.tables import markdown
    from scripts.studies.trainer import Trainer, places

    output = options.output.absolute()
    results = (options.results or output).absolute()
    study = read_study(options.study, options.override)
    book = RecordBook(results)
    trainer = Trainer(output, book, places(options), study.environment)
    with closing(trainer), progress(trainer.state):
        content = run_study(study, results, trainer.records, options.override, trainer.begin)
    print(markdown(content), end="")
    print(f"wrote {results}: results.json, runs.jsonl and table.md")
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("study", type=Path, help="YAML file of the study")
    parser.add_argument("output", type=Path, help="output folder of the runs")
    parser.add_argument(
        "--results", type=Path, help="folder of runs.jsonl and results.json (default: output)"
    )
    add_places(parser)
    parser.add_argument("override", nargs="*", help="override of every run's config")
    return parser.parse_intermixed_args(arguments)


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add the options that `places` reads."""
    parser.add_argument(
        "--jobs",
        type=whole_number(),
        metavar="N",
        help="number of simultaneous runs (default: 1, or as many as the GPUs allow)",
    )
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument(
        "--nproc", type=whole_number(), default=1, metavar="N", help="ranks of each run (default 1)"
    )
    ranks.add_argument(
        "--gpus-per-run",
        type=whole_number(),
        metavar="N",
        help="give each run N GPUs with one rank on each, and run as many at a time as this "
        "node's GPUs allow",
    )


if __name__ == "__main__":
    sys.exit(main())
