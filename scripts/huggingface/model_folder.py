"""Load transformers model folders, which may come from untrusted sources."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from training.errors import InputError
from training.json_file import check_shape, read_json

ATTENTION: Final = (None, "eager", "sdpa")
"""Attention implementations built into transformers. Any other value would make transformers
download and run code."""


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings in config.json.

    Raises InputError if the file cannot be read or requests attention code from the hub.
    """
    path = folder / "config.json"
    try:
        content: dict[str, Any] = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    check_shape(content, {}, str(path))
    for key, value in content.items():
        if "attn_implementation" in key and value not in ATTENTION:
            raise InputError(f"{path}: {key} must be eager or sdpa, got {value!r:.60}")
    return content


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Context manager that disables network access and progress bars in the Hugging Face
    libraries."""
    from huggingface_hub import constants
    from transformers.utils import logging

    before, shown = constants.HF_HUB_OFFLINE, logging.is_progress_bar_enabled()
    constants.HF_HUB_OFFLINE = True
    logging.disable_progress_bar()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        if shown:
            logging.enable_progress_bar()


def load_whole(folder: Path, **options: Any) -> Any:
    """Load the model in `folder` with transformers, without running code from the folder.

    transformers silently initializes missing weights randomly and ignores stored weights that do
    not match config.json. In both cases, this function raises an InputError that names the weights.
    It also raises InputError if the folder cannot be loaded or a weight is not finite.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # the error below contains transformers' report
    try:
        with offline():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # transformers raises many exception types here
        raise InputError(f"{folder} cannot be loaded: {error!r:.200}") from error
    finally:
        logging.set_verbosity(before)
    problems = [
        f"{len(names)} {kind}, such as {min(map(str, names))}"
        for kind, names in info.items()
        if names
    ]
    if problems:
        raise InputError(
            f"{folder}: the stored weights must match config.json, got {'; '.join(problems)}"
        )
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise InputError(f"{folder}: {name} must be finite, got NaN or infinity")
    return model
