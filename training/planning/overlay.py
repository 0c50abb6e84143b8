"""The config file of a layout: what it changes on top of another file."""

from collections.abc import Sequence

import yaml

from parallel.plan.devices import GIB
from training.config.files import escaped, merged_overrides, over
from training.planning.layouts import Layouts, Variant, by_section, changed


def overlay(
    layouts: Layouts, found: Variant, base: str, name: str, device: str, overrides: Sequence[str]
) -> str:
    """Return the text of a config `name` on top of the file `base` with the layout found.

    It holds what `overrides` of the command line say too, so that it describes the same run.

    device     name or file of the device, as `plan.device` takes it
    """
    config = layouts.config
    changes = {k: v for k, v in found.changes.items() if changed(config, {k: v}) != config}
    changes |= {"plan.gpus": layouts.gpus, "plan.device": device, "run.name": name}
    changes["run.dir"] = config.run.dir.replace(config.run.name, name)
    content = over(merged_overrides(overrides), escaped(by_section(changes)))
    head = (
        f"# Layout by --fit on {layouts.gpus} x {layouts.device.name}: modelled "
        f"{found.seconds:.2f} s per step,\n"
        f"# MFU {found.plan.mfu:.0%}, {found.plan.memory.total / GIB:.0f} GiB per GPU.\n"
        f"base: {base}\n\n"
    )
    return head + yaml.safe_dump(
        content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )
