"""
Processes for what a stranger's text may make loop for ever or fill the memory: only a process can be stopped.

A worker is a file of the project started by path, so that neither torch nor any other file is loaded in it. It writes
"ready", then reads a JSON request a line on stdin and writes a JSON reply a line on stdout. It ends when its stdin
does.
"""
import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading

START_TIMEOUT = 120.0  # seconds until a worker is ready; it takes one, but disks can be slow and cores shared


class NoReply(Exception):
    """A worker ran out of time or memory, or died."""


class Worker:
    """A process that answers one request at a time. program: the module whose file it runs, with what it is started
    with: MEMORY, bytes of address space, and TIMEOUT, seconds for a request. Raises RuntimeError when it cannot be
    started."""

    def __init__(self, program):
        # A session of its own keeps it out of the signals to the trainer's process group; a fixed hash seed gives every
        # run the same order of sets.
        command = [sys.executable, program.__file__, str(program.MEMORY), str(program.TIMEOUT)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
                                        env={**os.environ, "PYTHONHASHSEED": "0"})
        try:
            if self.line(START_TIMEOUT) != b"ready\n":
                raise RuntimeError(f"{program.__name__} did not start; what it wrote to stderr says why")
        except BaseException:
            self.kill()
            raise

    def line(self, timeout: float | None) -> bytes:
        """The next line that it writes; what there is of it where it ends before, as it does when the time is over."""
        timer, written = threading.Timer(timeout, self.process.kill), b""
        timer.start()
        try:
            while not written.endswith(b"\n") and (part := os.read(self.process.stdout.fileno(), 1 << 16)):
                written += part
        finally:
            timer.cancel()
        return written

    def ask(self, request: dict, timeout: float | None = None):
        """The reply to a request. timeout: seconds after which it is killed, None where it looks after that itself.
        Raises NoReply."""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise NoReply from None
        reply = self.line(timeout)
        if not reply.endswith(b"\n"):
            raise NoReply
        return json.loads(reply)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # something may be left in it
            self.process.stdin.close()


class Workers:
    """As many workers as there are requests at a time, up to `num`, or what the environment sets under a name. They are
    started when they are needed and end with this process."""

    def __init__(self, program, num: int = 1, setting: str = ""):
        self.program, self.num, self.setting = program, num, setting
        self.lock, self.slots = threading.Lock(), None

    def open(self) -> queue.LifoQueue:
        """The slots, each with a worker or None."""
        with self.lock:
            if self.slots is None:
                atexit.register(self.close)
                os.register_at_fork(after_in_child=self.forget)
                self.slots = queue.LifoQueue()  # the last one back is asked first, so that none is started without need
                for _ in range(int(os.environ.get(self.setting) or self.num)):
                    self.slots.put(None)
            return self.slots

    def ask(self, request: dict, timeout: float | None = None):
        """A worker's reply. Raises NoReply; another worker is started at the next request."""
        slots = self.open()
        worker = slots.get()
        try:
            if worker is not None and not worker.is_alive():
                worker = worker.kill()
            worker = worker or Worker(self.program)
            return worker.ask(request, timeout)
        except BaseException:  # KeyboardInterrupt too: a reply that nobody read would pass for the next one's
            worker = worker and worker.kill()
            raise
        finally:
            slots.put(worker)

    def forget(self) -> None:
        """In a forked child: a worker serves one process only."""
        self.lock, self.slots = threading.Lock(), None

    def close(self) -> None:
        """Ends the workers that are idle."""
        while self.slots is not None and not self.slots.empty():
            worker = self.slots.get()
            if worker is not None:
                worker.kill()
        self.slots = None
