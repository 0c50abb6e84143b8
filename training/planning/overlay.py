"""The config file of a layout: what it changes on top of another file."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from parallel.plan.devices import GIB
from training.config.files import escaped, merged_overrides
from training.planning.layouts import Layouts, Variant


def overlay(
    layouts: Layouts, found: Variant, base: str, name: str, device: str, overrides: Sequence[str]
) -> str:
    """Return the text of a config `name` on top of the file `base` with the layout found.

    It holds what `overrides` of the command line say too, so that it describes the same run.

    device     name or file of the device, as `plan.device` takes it
    """
    config = layouts.config
    content: dict[str, Any] = _mutable(merged_overrides(overrides))
    changes = {key: value for key, value in found.changes.items() if value != _value(config, key)}
    changes |= {"plan.gpus": layouts.gpus, "plan.device": device, "run.name": name}
    changes["run.dir"] = config.run.dir.replace(config.run.name, name)
    for key, value in changes.items():
        section, field = key.split(".")
        content.setdefault(section, {})[field] = value
    head = (
        f"# Layout by --fit on {layouts.gpus} x {layouts.device.name}: modelled "
        f"{found.seconds:.2f} s per step,\n"
        f"# MFU {found.plan.mfu:.0%}, {found.plan.memory.total / GIB:.0f} GiB per GPU.\n"
        f"base: {base}\n\n"
    )
    return head + yaml.safe_dump(
        escaped(content), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )


def _value(config: object, key: str) -> Any:
    section, field = key.split(".")
    return getattr(getattr(config, section), field)


def _mutable(content: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _mutable(v) if isinstance(v, Mapping) else v for k, v in content.items()}
