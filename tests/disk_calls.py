"""Record a program's syncs and renames, and find what a crash after a rename could lose."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import current_thread, main_thread

import pytest


class DiskCalls:
    """Records syncs and renames, including those of forked processes, in the file `calls`."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.file, self.process = folder / "calls", os.getpid()
        sync, rename, replace = os.fsync, os.rename, os.replace

        def synced(descriptor: int) -> None:
            ours = current_thread() is main_thread() and os.getpid() == self.process
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self._note(f"{'wait' if ours else 'sync'} {path}")
            sync(descriptor)

        def noted(call: Callable[..., None]) -> Callable[..., None]:
            def named(source: object, target: object) -> None:
                call(source, target)
                self._note(f"name {source} {target}")

            return named

        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "rename", noted(rename))
        patch.setattr(os, "replace", noted(replace))

    def _note(self, line: str) -> None:
        with self.file.open("a") as file:
            file.write(line + "\n")

    def lines(self) -> list[str]:
        """Return the calls: `name SOURCE TARGET`, `sync PATH`, or `wait PATH` for syncs on the main
        thread."""
        return self.file.read_text().splitlines()

    def lost(self, target: Path) -> Iterator[str]:
        """Yield what a crash after the rename to `target` could lose: files that were not synced
        before the rename, and the new name unless the next call in its folder syncs the folder."""
        lines, folder = [line.replace("wait ", "sync ") for line in self.lines()], target.parent
        renamed = max(i for i, line in enumerate(lines) if line.endswith(f" {target}"))
        source = Path(lines[renamed].split()[1])
        # torch writes an index under a temporary name.
        synced = {line.removesuffix(".tmp") for line in lines[:renamed]}
        for path in (target, *target.rglob("*")):
            if f"sync {source / path.relative_to(target)}" not in synced:
                yield f"the content of {path}"
        sync, others = f"sync {folder}", f"name {folder}/"
        later = [line for line in lines[renamed + 1 :] if line == sync or line.startswith(others)]
        if later[:1] != [sync]:
            yield f"the name {target}"
