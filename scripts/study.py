"""Tune a study's variants at equal cost, train them with several seeds and compare the results.

    python scripts/study.py studies/sso/radius.yaml runs/studies/radius
    python scripts/study.py studies/sso/radius.yaml runs/studies/radius --jobs 2 train.steps=50

A study is a YAML file with a `title`, `seeds`, `overrides` that apply to every run, and named
`variants`. A variant has a `config`, its own `overrides`, and `against`, the variant to compare it
with. Each run is a pretrain.py process with the study's `environment` and one thread per rank. The
number of ranks is `--nproc` or `--gpus-per-run`. Finished runs are recorded in runs.jsonl with
their results and settings. A recorded run is not repeated, even if its folder is gone, so an
interrupted study resumes when you run the same command again. If the data or environment of a
finished run has changed, the script reports an error. Several processes with the same command,
started by hand or as a SLURM array (scripts/slurm/study.sbatch), share the runs. results.json and
table.md are written next to runs.jsonl after each part of the study; results.json contains
`complete: false` until the study is done.

A run's result is its final validation loss in nats per token, averaged over its validation sets.
The seed sets the initial weights and the data order. Variants are compared seed by seed, using the
95% Student's t confidence interval of the mean difference. The verdict is `level` if the whole
interval is within 0.02 nats of 0; otherwise, it is `cannot tell` if the interval contains 0. A run
with a nonfinite loss fails, and its variant has no mean. If a chosen setting is at either end of
its grid, the verdict is `refused`. At the start, the script prints all keys that differ between a
variant and its reference, except keys that are tuned or listed in `overrides` or `differs`. These
keys are also listed in table.md.

With `search`, every variant is first tuned by successive halving. Each stage trains its candidates
for a `share` of the `full` length, and then trains the best `keep` candidates for the next share.
All candidates use the search's `seed`, unless a share lists its own `seeds`. The next stage starts
from the best candidate. The tuning cost must be the same for all variants. With `tuned_in`,
variants start from the settings chosen in another study. In a width sweep, each variant is a model
width, and the only stage is a grid of learning rates.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.command import command, new_parser, output_path, whole_number
from training.report.text import progress


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study and print its tables."""
    options = parse(arguments)
    # Deferred: these modules import torch and pandas.
    from scripts.studies.description import read_study
    from scripts.studies.records import RecordBook
    from scripts.studies.running import run_study
    from scripts.studies.tables import markdown
    from scripts.studies.trainer import StudyTrainer, places

    output = options.output.absolute()
    results = (options.results or output).absolute()
    study = read_study(options.study, options.override)
    book = RecordBook(results)
    trainer = StudyTrainer(output, book, places(options), study.environment)
    with closing(trainer), progress(trainer.state):
        content = run_study(study, results, trainer.records, options.override, trainer.begin)
    print(markdown(content), end="")
    print(f"wrote {results}: results.json, runs.jsonl and table.md")
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("study", type=Path, help="study description (YAML file)")
    parser.add_argument("output", type=output_path, help="folder for the runs")
    parser.add_argument(
        "--results",
        type=output_path,
        help="folder for runs.jsonl and the results (default: output)",
    )
    parser.add_argument(
        "--jobs",
        type=whole_number(),
        metavar="N",
        help="number of concurrent runs (default: 1; with --gpus-per-run, as many as fit)",
    )
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument(
        "--nproc",
        type=whole_number(),
        default=1,
        metavar="N",
        help="ranks per run (default: 1)",
    )
    ranks.add_argument(
        "--gpus-per-run",
        type=whole_number(),
        metavar="N",
        help="use N GPUs per run, with one rank per GPU; without --jobs, train as many runs at a "
        "time as fit on this node's GPUs",
    )
    parser.add_argument("override", nargs="*", help="key=value config override for every run")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
