"""Python that has imported everything before: a process that waits, and forks for each program that it is to run.

    python(imports)                              the beginning of a command, which takes -c and -m as Python does
    python forked.py serve SOCKET IMPORTS...     what waits
    python forked.py SOCKET -m MODULE ARGUMENTS  what the command does: it has the program run there, on its streams

A program gets the streams, the environment and the folder of its command, which ends with its exit code. Of a start by
itself only the imports are missing, and what Python reads of the environment before them but for PYTHONPATH,
PYTHONUNBUFFERED and the encoding of streams.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import sys
from typing import Any

STREAMS = 3


def python(*imports: str, **environment: str) -> list[str]:
    """The beginning of a command that runs a program in a fork of a process with these imports and this environment."""
    key = (*imports, *environment.items())
    if key not in _STARTED or _STARTED[key][1].poll() is not None:
        import subprocess
        import tempfile

        path = os.path.join(tempfile.mkdtemp(), "socket")
        # It ends when this process does, with its standard input.
        process = subprocess.Popen(
            [sys.executable, __file__, "serve", path, *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        _STARTED[key] = ([sys.executable, "-ISE", __file__, path], process)
    return _STARTED[key][0]


_STARTED: dict[tuple[object, ...], tuple[list[str], Any]] = {}


def ask(path: str, arguments: list[str]) -> int:
    """The exit code of a command with these arguments and the streams of this process."""
    streams = [fd for fd in range(STREAMS) if _is_open(fd)]
    while (taken := os.open(os.devnull, os.O_RDWR)) < STREAMS:  # so that the socket is none of the streams
        pass
    os.close(taken)
    asked = {
        "arguments": [os.fsencode(argument).hex() for argument in arguments],
        "environment": {key: os.fsencode(value).hex() for key, value in os.environ.items()},
        "folder": os.getcwd(),
        "streams": streams,
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        text = json.dumps(asked).encode()
        socket.send_fds(connection, [len(text).to_bytes(8, "big")], streams)
        connection.sendall(text)
        return int(connection.recv(16) or b"70")


def wait(path: str, imports: list[str]) -> list[str]:
    """Run what clients ask for, until standard input ends; returns the arguments in the process of each program."""
    import gc
    import importlib

    for name in imports:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the attendants
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([listener, 0], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return _attend(connection)
            connection.close()
    os.unlink(path)
    os.rmdir(os.path.dirname(path))
    os._exit(0)


def _attend(connection: socket.socket) -> list[str]:
    """Start a client's program, and tell its exit code; it is killed when the client has gone, or who waits for all."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, given, _, _ = socket.recv_fds(connection, 8, STREAMS)
    asked = json.loads(_read(connection, int.from_bytes(head, "big")))
    child = os.fork()
    if child == 0:
        connection.close()
        return _become(asked, given)
    for fd in given:
        os.close(fd)
    killed = False
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if not killed and select.select([connection, 0], [], [], 0.005)[0]:
            os.kill(child, signal.SIGKILL)
            killed = True
    code = os.waitstatus_to_exitcode(done[1])
    with contextlib.suppress(OSError):
        connection.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def _become(asked: dict, given: list[int]) -> list[str]:
    """Take over a client's streams, environment and folder; its arguments."""
    for fd in range(STREAMS):
        os.close(fd)
    for fd, mine in zip(asked["streams"], given, strict=True):
        os.dup2(mine, fd)
    for fd in given:
        os.close(fd)
    environment = {key: os.fsdecode(bytes.fromhex(value)) for key, value in asked["environment"].items()}
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(asked["folder"])
    paths = environment.get("PYTHONPATH", "")
    sys.path[:1] = ["", *(path for path in paths.split(os.pathsep) if path)]
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    held = environment.get("PYTHONUNBUFFERED", "") == ""
    sys.stdin, sys.stdout, sys.stderr = (_stream(fd, encoding, held) for fd in range(STREAMS))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    return [os.fsdecode(bytes.fromhex(argument)) for argument in asked["arguments"]]


def _stream(fd: int, encoding: str, held: bool) -> io.TextIOWrapper | None:
    """A stream as Python makes it at its start; None where it is closed."""
    if not _is_open(fd):
        return None
    raw: io.BufferedIOBase | io.FileIO = io.FileIO(fd, "rb" if fd == 0 else "wb", closefd=False)
    if fd == 0:
        raw = io.BufferedReader(raw)
    elif held:
        raw = io.BufferedWriter(raw)
    errors = "backslashreplace" if fd == 2 else "strict"
    return io.TextIOWrapper(raw, encoding, errors, line_buffering=fd == 2, write_through=not held and fd != 0)


def _read(connection: socket.socket, count: int) -> bytes:
    text = b""
    while len(text) < count:
        text += connection.recv(count - len(text))
    return text


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    if sys.argv[1] != "serve":
        os._exit(ask(sys.argv[1], sys.argv[2:]))
    kind, what, *arguments = wait(sys.argv[2], sys.argv[3:])
    sys.argv = [kind, *arguments]
    if kind == "-m":
        import runpy

        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        import types

        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)
