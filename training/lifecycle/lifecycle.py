"""What goes on beside the training steps: saving, stopping when asked, and signs of life."""

from collections.abc import Mapping
from typing import Any

from parallel.comm.agreement import Agreement
from training.checkpoint.saving import CheckpointError, Saver
from training.config import Config
from training.lifecycle.preemption import REASONS, StopRequests
from training.lifecycle.watchdog import Watchdog


class Lifecycle:
    """Asked after every step, on all ranks alike. What any rank knows, all act on together."""

    def __init__(
        self,
        config: Config,
        saver: Saver,
        stops: StopRequests,
        watchdog: Watchdog,
        agreement: Agreement,
    ) -> None:
        self.config = config
        self.saver = saver
        self.stops = stops
        self.watchdog = watchdog
        self.agreement = agreement
        self.step = 0
        self._asked_about_save = False
        self._stop = 0

    @property
    def reason(self) -> str | None:
        """Why the run is to stop, None if it is not."""
        return REASONS.get(self._stop)

    @property
    def stopping(self) -> bool:
        """Whether the run is to stop, as all ranks know by now."""
        return self._stop > 0

    def after_step(self, step: int) -> None:
        """None; after every step, completes a save that all ranks have written.

        Raises CheckpointError if a writer failed.
        """
        self.step = step
        self.watchdog.beat(step)
        failed, busy = self.saver.status()
        asked, self._asked_about_save = self._asked_about_save, self.saver.busy
        answer = self.agreement.delayed([self.stops.wanted(), failed, busy])
        if answer is None:  # nothing was asked since the ranks last met
            return
        stop, failed, busy = answer
        if failed:
            self.saver.fail()
            self.stop_now()  # it drops the exchange under way, which tells of this failure again
        elif asked and not busy:
            self.saver.complete()
        if not self.saver.busy:
            self._asked_about_save = False
        self._stop = self._stop or stop

    def stop_now(self) -> bool:
        """Whether any rank wants to stop at this moment; for pauses between steps."""
        self.watchdog.beat(self.step)
        self._stop = self._stop or self.agreement.now([self.stops.wanted(), 0, 0])[0]
        return self._stop > 0

    def due(self, step: int) -> bool:
        """Whether the run is saved after `step`, as it is not the last."""
        interval = self.config.checkpoint.interval
        return interval > 0 and step % interval == 0

    def save(self, meta: Mapping[str, Any]) -> None:
        """Begin a save, having waited for the one before; with `checkpoint.asynchronous`
        false it also waits for this one."""
        self.wait()
        self.saver.begin(meta)
        if not self.config.checkpoint.asynchronous:
            self.wait()

    def save_last(self, meta: Mapping[str, Any]) -> None:
        """See to it that the run is saved as it is now, if it is saved at all, and takes a
        request to stop as obeyed."""
        if self.config.checkpoint.interval > 0:
            self.wait()
            if self.saver.last_saved != meta["step"]:
                self.saver.begin(meta)
                self.wait()
            if self.saver.last_saved != meta["step"]:
                raise CheckpointError(
                    f"step {meta['step']}, the last, could not be saved: its state is not finite"
                )
        if self.stopping:
            self.stops.obeyed()

    def wait(self) -> None:
        """Wait until the save under way is complete."""
        self.saver.wait(
            lambda failed: self.agreement.now([0, int(failed), 0])[1] > 0,
            lambda: self.watchdog.beat(self.step),
        )
        self._asked_about_save = False
