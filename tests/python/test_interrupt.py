"""Ctrl-C and cancel from another thread stop a generation and leave the session usable."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import flashnext

SUM = "Add 17 and 14."

SCRIPT = """
import sys
import flashnext

session = flashnext.Session(flashnext.demo_path(), device="host")
stop, session.stop_ids = session.stop_ids, []

def told(*_):
    if not told.done:
        told.done = True
        print("running", flush=True)
told.done = False

try:
    MODE
except KeyboardInterrupt:
    print("stopped", flush=True)
else:
    print("not stopped", flush=True)
session.stop_ids = stop
print(session.generate("Add 17 and 14.").text, flush=True)
"""

MODES = {
    "generate": 'session.generate("Hi", max_new_tokens=4000, on_token=told)',
    "without callbacks": 'told(); session.generate("Hi", max_new_tokens=4000)',
    "prefill": "session.generate([5] * 4000, on_prefill=told, max_new_tokens=90)",
    "stream": 'for _ in session.generate("Hi", max_new_tokens=4000, stream=True): told()',
    "batch": 'session.generate_batch(["Hi", "Ho"], max_new_tokens=3000, on_token=told)',
}


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c(mode: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("MODE", MODES[mode])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    if mode == "without callbacks":
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert out == "stopped\n17 + 14 = 31.\n", (out, err)
    assert time.monotonic() - started < 10


def test_cancel_from_another_thread(open_session: Callable[..., flashnext.Session]) -> None:
    session = open_session()
    stops, session.stop_ids = session.stop_ids, []
    started = threading.Event()
    done: list[flashnext.Generation] = []

    def work() -> None:
        done.append(session.generate("Hi", max_new_tokens=4000, on_token=lambda *_: started.set()))

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(30)
    session.cancel()
    thread.join(30)
    assert not thread.is_alive()
    assert done[0].finish_reason == "cancelled" and 0 < len(done[0].tokens) < 4000
    session.stop_ids = stops
    # A cancel without a running generation is not kept for the next one.
    session.cancel()
    assert session.generate(SUM).text == "17 + 14 = 31."


def test_other_threads_run_while_the_engine_does(session: flashnext.Session) -> None:
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.perf_counter()
    session.logits([7] * 2000)
    seconds = time.perf_counter() - started
    stop.set()
    thread.join()
    # With the lock held for the whole call there would be a tick or two.
    assert ticks > min(20, seconds * 100)


def test_these_tests_run_in_the_background_of_a_script() -> None:
    # A shell starts what it puts into the background with SIGINT ignored.
    test = f"{__file__}::test_ctrl_c"
    command = f"trap '' INT; exec {sys.executable} -m pytest -q -p no:cacheprovider '{test}'"
    done = subprocess.run(
        ["bash", "-c", f"{command} -k 'generate or stream'"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout
