"""The GPU that a run is planned or rehearsed for, given by name or described in a YAML file."""

from dataclasses import asdict
from pathlib import Path

from models.section import named
from parallel.plan.devices import DEVICES, Device
from training.config.binding import InvalidConfigError, bind
from training.config.yaml_files import over, read_saved


def device_named(text: str) -> Device:
    """Return the device with the name `text`, or described in the YAML file `text`, whose `base`
    names the device that supplies the omitted figures.

    Raises InvalidConfigError if there is neither, or with all problems of the file.
    """
    if text in DEVICES:
        return DEVICES[text]
    if not Path(text).is_file():
        raise InvalidConfigError([f"device must be a file or {named(text, DEVICES)}"])
    figures = dict(read_saved(Path(text)))
    base = str(figures.pop("base", "h100"))
    if base not in DEVICES:
        raise InvalidConfigError([f"{text}: base must be {named(base, DEVICES)}"])
    try:
        return bind(Device, over(asdict(DEVICES[base]), figures))
    except InvalidConfigError as error:
        raise InvalidConfigError([f"{text}: {line}" for line in error.problems]) from None
