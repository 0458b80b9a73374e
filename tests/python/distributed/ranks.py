"""Several processes with one process group, started once for many tests. A rank that stops is named."""

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 60


def _serve(rank: int, size: int, folder: str, paths: list[str], answers: Any) -> None:
    """One process: calls what it is sent, until it is sent nothing."""
    sys.path[:0] = [path for path in paths if path not in sys.path]
    stacks = open(Path(folder) / f"stack{rank}", "w")  # noqa: SIM115 - for the whole life of the process
    faulthandler.register(signal.SIGUSR1, stacks)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
        MOEGEMM_NUM_THREADS="1",
    )  # fmt: skip
    limit = datetime.timedelta(seconds=SECONDS)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    while True:
        message = pickle.loads(answers.recv_bytes())
        if message is None:
            break
        function, arguments = message
        torch.manual_seed(0)
        try:
            found = True, function(*arguments)
        except BaseException:
            found = False, traceback.format_exc()
        answers.send_bytes(pickle.dumps(found))
    dist.destroy_process_group()


class Ranks:
    """`run` calls a function of a test module in every process and returns what each has found."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.tensor", "moegemm"])
        self._pipes, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (rank, size, self._folder.name, sys.path, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS + 30) -> list[Any]:
        message = pickle.dumps((function, arguments))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        until = time.monotonic() + seconds
        found, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                arrived = pipe.poll(max(0.0, until - time.monotonic()))
                ok, result = pickle.loads(pipe.recv_bytes()) if arrived else (False, self._stopped(rank, seconds))
            except (EOFError, ConnectionError):
                ok, result = False, f"its process ended with exit code {self._processes[rank].exitcode}"
            found.append(result)
            if not ok:
                failures.append(f"rank {rank} of {self.size}: {result}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return found

    def _stopped(self, rank: int, seconds: float) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
        stack = (Path(self._folder.name) / f"stack{rank}").read_text()
        return f"no answer in {seconds:.0f} s; it is at\n{stack}"

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(pickle.dumps(None))
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
        self._processes = []
        self._folder.cleanup()
