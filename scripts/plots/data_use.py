"""What a run reads of each set of its data, from its data.json and metrics."""

from typing import Any, Final

from scripts.plots.run_data import Line, RunData
from training.errors import InputError
from training.json_file import check_shape, read_json

SHAPE: Final = {
    "sets": [{"name": str, "tokens": int, "epochs": int | float, ...: str | int | float}],
    "phases": [{"after_steps": int, "shares": {...: int | float}}],
    ...: object,
}


def data_use(run: RunData) -> dict[str, Any] | None:
    """Return the header and the rows of the page's table of sets, None for a run that is older than
    its figures or has no readable data.json."""
    path = run.folder / "data.json"
    try:
        content = read_json(path)
        check_shape(content, SHAPE, str(path))
    except (OSError, ValueError, InputError):
        return None
    phases = content["phases"]
    last: Line = next((m for m in reversed(run.metrics) if any(map(_is_count, m))), {})
    header = ["set", *(f"from step {phase['after_steps'] + 1:,}" for phase in phases)]
    header += ["tokens read"] * bool(last) + ["tokens in all", "epochs"]
    rows = []
    for each in content["sets"]:
        name = each["name"]
        read = [f"{last.get(f'data/{name}/tokens', 0):,}"] if last else []
        shares = [f"{phase['shares'].get(name, 0):.1%}" for phase in phases]
        rows.append([name, *shares, *read, f"{each['tokens']:,}", f"{each['epochs']:.2f}"])
    return {"header": header, "rows": rows}


def _is_count(key: str) -> bool:
    return key.startswith("data/") and key.endswith("/tokens")
