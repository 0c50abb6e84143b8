"""Start the process groups, and compare settings, code, versions and data across ranks."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from threading import Timer
from typing import Any, Final

from torch.distributed import DistStoreError

from parallel.comm.collectives import CollectiveError, disagreements
from parallel.comm.groups import Groups, initialize, world_size
from training.config import Config
from training.config.yaml_files import flat
from training.errors import ConfigError, InputError
from training.machine.device import ROOT, allow_open_files, device_type, library_versions, prepare

FOLDERS: Final = ("spectral", "models", "parallel", "training")
"""Folders whose files must be identical on all ranks."""
RENDEZVOUS: Final = ("MASTER_ADDR", "MASTER_PORT", "RANK")
"""Environment variables by which several ranks find each other."""
PATIENCE: Final = 30.0
"""Seconds after which the first rank of a node prints that it is waiting for other ranks."""


class RanksDifferError(InputError):
    """Raised when ranks differ in settings, code, versions or data."""


def start_groups(config: Config, **options: str) -> Groups:
    """Start the process groups for the config's layout. Destroy them with
    `parallel.comm.groups.shutdown`.

    Raises RanksDifferError if ranks differ in settings, `options`, code or versions. Raises
    CollectiveError if not all ranks start within `parallel.timeout_seconds`. Raises ConfigError if
    there are several ranks but a variable in `RENDEZVOUS` is not set. Also raises the ConfigError
    of `check_restarts` and `allow_open_files`.
    """
    missing = ", ".join(name for name in RENDEZVOUS if name not in os.environ)
    if world_size() > 1 and missing:
        raise ConfigError(
            f"WORLD_SIZE = {world_size()} requires {missing} to be set: launch with "
            "torchrun or --ranks, or unset WORLD_SIZE to train on one rank"
        )
    check_restarts()
    allow_open_files()
    facts = {**dict(flat(asdict(config))), **options}
    facts |= {f"code of {name}": source_hash(ROOT / name) for name in FOLDERS}
    facts |= {f"version of {name}": version for name, version in library_versions().items()}
    prepare(config)
    ranks = f"all {world_size()} ranks (WORLD_SIZE)"
    where = f"at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    limit = f"parallel.timeout_seconds = {config.parallel.timeout_seconds:g}"
    text = f"waiting for {ranks} to connect {where} ({limit})"
    waiting = Timer(PATIENCE, print, [text], {"flush": True})
    waiting.daemon = True
    if world_size() > 1 and os.environ.get("LOCAL_RANK", "0") == "0":
        waiting.start()

    def agree() -> None:
        waiting.cancel()
        require_agreement(facts)

    try:
        return initialize(
            config.parallel.layout,
            timeout_seconds=config.parallel.timeout_seconds,
            device_type=device_type(config),
            agree=agree,
        )
    except DistStoreError as error:
        raise CollectiveError(f"{ranks} must connect {where} within {limit}: {error}") from error
    finally:
        waiting.cancel()


def check_restarts() -> None:
    """Raise ConfigError if torchrun may restart ranks on multiple nodes that share a store.

    Each node counts its own restarts, so ranks in different attempts could wait for each other.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if shared and restarts and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE must be 1 in torchrun's environment for "
            "--max-restarts on several nodes, got "
            f"{os.environ.get('TORCH_DISABLE_SHARE_RDZV_TCP_STORE', 'nothing')}"
        )


def source_hash(folder: Path) -> str:
    """Hash the paths and contents of all Python and JSON files in a folder."""
    digest = hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def require_agreement(facts: Mapping[str, Any]) -> None:
    """If facts differ between ranks, raise RanksDifferError on all ranks. The message contains one
    line per differing fact. Collective."""
    lines = disagreements(facts)
    if lines:
        raise RanksDifferError("\n".join(lines))
