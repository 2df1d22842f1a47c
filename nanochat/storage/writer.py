"""
Checkpoints in the background: a thread writes a copy on the host while training goes on.

A set of files counts from its last file on, its mark, which is written when every rank has written its part. The thread
calls no collective: the ranks agree on the main thread, where they look for a request to stop (Run.check_stop).
"""
import contextlib
import threading
import time
from collections.abc import Callable

import torch

from nanochat.common import CannotWrite, Diverged, StopRequested, gather_lists, print0, rank_and_world

TOLD_FROM = 1.0  # seconds of waiting for the set before


class Writer:
    """Writes one set of files at a time. All ranks call `saving`, `start` and `finish` at the same points.

    pinned: page-locked memory for copies from a GPU, by shape and dtype, kept for the next set since it is slow to get;
    used: what the set under way has of it.
    """

    def __init__(self, device: torch.device):
        self.device, self.thread = device, None
        self.pinned: dict[tuple, list[torch.Tensor]] = {}
        self.used: list[torch.Tensor] = []
        self.record: dict[str, float] = {}  # what the next record of the log says of saving

    def is_busy(self) -> bool:
        """Whether this rank's files of a set are being written."""
        return self.thread is not None and self.thread.is_alive()

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor on the host that shares nothing with it; one from a GPU is complete when `start` returns,
        and its memory is used again after the set's end."""
        if x.device.type != "cuda":
            return x.detach().to("cpu", copy=True)
        free = self.pinned.setdefault((tuple(x.shape), x.dtype), [])
        self.used.append(free.pop() if free else page_locked(x))
        return self.used[-1].copy_(x.detach(), non_blocking=True)

    @contextlib.contextmanager
    def saving(self):
        """Around the main thread's part of a save: waits for the set before; counts the time. A collective."""
        started = time.time()
        self.finish()
        waited = self.record["timing_s/save_wait"] = time.time() - started
        if waited > TOLD_FROM:
            print0(f"a checkpoint waited {waited:.1f} s for the one before to be written: --save-every is short for "
                   f"this disk")
        try:
            yield
        finally:
            self.record["timing_s/save"] = time.time() - started

    def start(self, write: Callable[[], list], mark: Callable[[list], None]) -> None:
        """Begins to write a set. write(): in the thread, writes this rank's files and gives what it tells of them, a
        list of json values; mark(told): once all ranks have written theirs, with the lists of all joined, on the main
        thread of each: makes the set count."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the copies are complete
        self.mark, self.told, self.error, self.written_in = mark, [], None, 0.0

        def run():
            started = time.time()
            try:
                self.told = write()
            except Exception as error:  # raised again on the main thread
                self.error = error
            self.written_in = time.time() - started
        self.thread = threading.Thread(target=run, name="checkpoint")
        self.thread.start()

    def finish(self) -> None:
        """Waits until the set under way is written, if there is one, and makes it count. A collective. Raises
        CannotWrite on all ranks where one could not write its part: the set never counts then."""
        if self.thread is None:
            return
        self.thread.join()
        mark, error, self.thread, self.mark = self.mark, self.error, None, None
        self.record["timing_s/write"] = self.written_in
        for host in self.used:
            self.pinned[tuple(host.shape), host.dtype].append(host)
        self.used.clear()
        said = gather_lists([[error and str(error), self.told]], self.device)
        if error:
            raise error
        for text, _ in said:
            if text is not None:
                raise CannotWrite(text)
        mark([item for _, told in said for item in told])

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _) -> None:
        """Whatever ends a run, what is being written is written to its end; it counts where all ranks end alike."""
        try:
            if rank_and_world()[1] == 1 or error is None or isinstance(error, Diverged | StopRequested):
                self.finish()
            elif self.thread:
                self.thread.join()
        except CannotWrite as failed:
            if error is None:
                raise
            print0(f"WARNING: {failed}")

    def take_record(self) -> dict[str, float]:
        """What was noted of saving since the last call."""
        taken, self.record = self.record, {}
        return taken


def page_locked(x: torch.Tensor) -> torch.Tensor:
    """Memory on the host for a copy of a CUDA tensor, page-locked where the system allows it: the copy then is fast and
    does not wait. Registered as it is, since PyTorch's own allocator rounds up to a power of two."""
    host = torch.empty(x.shape, dtype=x.dtype)
    if host.nbytes:
        torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 1)  # portable; a refusal makes it slower
    return host
