"""Beginning a study with what another has found."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.studies.schema import Study, TunedIn
from scripts.studies.tables import comparison, grid_ends, read_results
from training.errors import DataError


def begin(study: Study, root: Path) -> tuple[Study, dict[str, list[str]]]:
    """The study with the variants that it is to have, and the overrides that each begins with.

    `root` is the folder that `tuned_in.results` is relative to. Raises DataError unless the other
    study is complete, has these variants, and chose none of their settings at the end of a grid.
    """
    if study.tuned_in is None:
        return study, {}
    content = read_results(root / study.tuned_in.results / "results.json")
    if not content["complete"]:
        raise DataError(f"tuned_in.results: the study in {study.tuned_in.results} is not complete")
    sources = {name: variant.tuned_as or name for name, variant in study.variants.items()}
    missing = sorted({*sources.values()} - content["chosen"].keys())
    if missing:
        raise DataError(f"{study.tuned_in.results} has no variants {', '.join(missing)}")
    taken = taken_variants(study, study.tuned_in, content)
    ended = grid_ends(content)
    if ends := [
        end for name in study.variants if name in taken for end in ended.get(sources[name], [])
    ]:
        raise DataError(f"tuned_in.results: {'; '.join(ends)}: extend the grid first")
    variants = {name: study.variants[name] for name in study.variants if name in taken}
    chosen = {name: content["chosen"][sources[name]] for name in variants}
    return replace(study, variants=variants), chosen


def taken_variants(study: Study, tuned: TunedIn, content: dict[str, Any]) -> set[str]:
    """The best `tuned.best` variants, all without it, and those of `always`; also what they are
    compared against."""
    if tuned.best is None:
        return set(study.variants)
    losses = comparison(content).set_index("variant")["loss"].fillna(math.inf)
    others = [name for name in study.variants if name not in tuned.always]
    others.sort(key=lambda name: float(losses[study.variants[name].tuned_as or name]))
    taken = {*others[: tuned.best], *tuned.always}
    against = {study.variants[name].against for name in taken}
    return taken | {name for name in against if name is not None}
