"""Runs commands in separate processes, under limits: `harness.Zygote` starts it once, and it
forks for every command.

Modules that take seconds to import are imported before the first fork. None of them has begun to
compute, so forking is safe. A request is a line of JSON on standard input, and so is the answer on
standard output:

    {"argv": [...], "log": FILE, "folder": FOLDER, "input": FOLDER, "seconds": S, "cpu": S,
    "memory": BYTES, "descriptors": N} {"code": N or null, "signal": N or null, "hung": bool, "cpu":
    S, "peak": BYTES}

``argv`` is that of jaxtrain, or ["call", NAME, ARGUMENT …], a function of probes.py.
"""

import gc
import json
import os
import re
import resource
import signal
import sys
import time

IMPORTS = (
    "jax",
    "orbax.checkpoint",
    "pyarrow.parquet",
    "loaders.audio.spectrogram",
    "loaders.text.tokens",
    "loaders.chat.chat_audio",
    "loaders.film.multimodal",
    "loaders.sudoku.sudoku",
    "jaxtrain.arrays.safetensors",
    "jaxtrain.arrays.peft",
    "jaxtrain.workloads.bird.inference.embed",
    "jaxtrain.workloads.bird.inference.probe",
    "jaxtrain.workloads.audio_language.generate_audio",
    "jaxtrain.workloads.audio_language.commands.train_codec",
    "jaxtrain.assembly",
    "tests.hostile.probes",
)
LEAK = "LEAKED DESCRIPTOR"
PATIENCE = 2.0  # [s]: tensorstore closes a file on a thread of its own, after the read has returned


def main() -> None:
    for name in IMPORTS:
        __import__(name)
    # Every case of an attack compiles the same programs, so all are cached here, even those that
    # compile quickly.
    sys.modules["jax"].config.update("jax_persistent_cache_min_compile_time_secs", 0)
    gc.freeze()  # a fork copies no page of theirs to collect its own garbage
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


def serve(request: dict) -> dict:
    """Runs one command, and reports how it ended."""
    child = os.fork()
    if not child:
        try:
            run(request)
        finally:
            os._exit(99)
    began, hung = time.monotonic(), False
    while True:
        found, status, used = os.wait4(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() - began > request["seconds"]:
            hung = True
            os.killpg(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
            break
        time.sleep(0.005)
    stopped = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    peak = used.ru_maxrss * (1024 if sys.platform == "linux" else 1)
    return {
        "code": code,
        "signal": stopped,
        "hung": hung,
        "cpu": used.ru_utime + used.ru_stime,
        "peak": peak,
    }


def run(request: dict) -> None:
    """In the child: the command, its output in a file, and the descriptors that it left open."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.chdir(request["folder"])
    mapped = (
        int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        if sys.platform == "linux"
        else 0
    )
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, request["cpu"]),
        (resource.RLIMIT_NOFILE, request["descriptors"]),
        (resource.RLIMIT_AS, mapped + request["memory"]),
        (resource.RLIMIT_FSIZE, 1 << 30),
    ):
        resource.setrlimit(what, (most, most))
    argv = request["argv"]
    code = 98
    try:
        if argv[0] == "call":
            from tests.hostile import probes

            code = getattr(probes, argv[1])(*argv[2:])
        else:
            from jaxtrain import cli

            code = cli.main(argv)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    gc.collect()
    deadline = time.monotonic() + PATIENCE
    while (leaks := left_open(request["input"])) and time.monotonic() < deadline:
        time.sleep(0.02)
    for target in leaks:
        print(f"{LEAK}: {target}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if 0 <= (code or 0) < 256 else 97)


def left_open(folder: str) -> list[str]:
    """Return the files below ``folder`` that this process has open."""
    if sys.platform != "linux":
        return []
    # Python's mmap keeps a descriptor as long as it is open.
    mapped_files = {line.split(None, 5)[-1].strip() for line in open("/proc/self/maps")}
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            flags = int(open(f"/proc/self/fdinfo/{descriptor}").read().split()[3], 8)
        except OSError:  # the descriptor of the listing itself
            continue
        # The run's own log in its workdir, which stays open to the end of its process.
        is_log = flags & os.O_ACCMODE == os.O_WRONLY and re.fullmatch(
            r"process-\d+\.log", os.path.basename(target)
        )
        if target.startswith(folder) and target not in mapped_files and not is_log:
            found.append(target)
    return found


if __name__ == "__main__":
    main()
