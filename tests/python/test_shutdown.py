"""How things end: the interpreter while threads wait, a process after a fork, calls by Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from helpers import run_python

pytestmark = [pytest.mark.timeout(200)]

HEAD = """
import asyncio, gc, os, signal, sys, threading, time
import flashnext
from flashnext import InputError

STORY = "Tell me a story about a fox and a lamp."

def opened(**options):
    session = flashnext.Session(flashnext.demo_path(), device="host", **options)
    session.stop_ids = []  # answers go on to their limit
    return session

def daemon(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
"""

# What goes on when the main thread comes to its end.
AT_EXIT = {
    "generating": """
s = opened()
daemon(lambda: s.generate(STORY, max_new_tokens=3000))
time.sleep(0.2)
""",
    "generating with callbacks": """
s = opened()
daemon(lambda: s.generate(STORY, max_new_tokens=3000, on_token=lambda *_: None))
time.sleep(0.2)
""",
    "streaming": """
s = opened()
daemon(lambda: [len(piece) for piece in s.generate(STORY, max_new_tokens=3000, stream=True)])
time.sleep(0.2)
""",
    "a batch": """
s = opened(lanes=2)
daemon(lambda: s.generate_batch([STORY] * 4, max_new_tokens=3000))
time.sleep(0.2)
""",
    "logits": """
s = opened()
daemon(lambda: s.logits([5] * 4000))
time.sleep(0.2)
""",
    "a queue": """
s = opened()
for _ in range(6):
    daemon(lambda: s.generate(STORY, max_new_tokens=3000))
time.sleep(0.2)
""",
    "opening": """
def work():
    while True:
        opened()
daemon(work)
time.sleep(0.15)
""",
    "opening with progress": """
def work():
    while True:
        opened(progress=lambda *_: None)
daemon(work)
time.sleep(0.15)
""",
    "asyncio": """
s = opened()
async def main():
    await asyncio.gather(*(s.submit(STORY, max_new_tokens=3000) for _ in range(3)))
daemon(lambda: asyncio.run(main()))
time.sleep(0.2)
""",
    "a policy": """
class Slow(flashnext.Policy):
    def plan(self, counters):
        for _ in range(2000): pass
        return flashnext.PlanOutput()
s = opened(experts="offload", cache_lines=8, policy=Slow(), plan_every=1)
daemon(lambda: s.generate(STORY, max_new_tokens=3000))
time.sleep(0.3)
""",
    "an open stream": """
s = opened()
stream = s.generate(STORY, max_new_tokens=3000, stream=True)
next(stream)
""",
    "unread handles": """
s = opened()
handles = [s.submit(STORY, max_new_tokens=3000) for _ in range(5)]
""",
    "a handle in a cycle": """
s = opened()
handle = s.submit(STORY, max_new_tokens=3000)
handle.me, s.me = handle, s
""",
    "calls that never stop": """
s = opened()
handle = s.submit(STORY, max_new_tokens=300)
def work(call):
    while True:
        try: call()
        except InputError: pass
for call in (handle.cancel, s.cancel, handle.done, s.stats, lambda: s.submit(STORY)):
    daemon(lambda: work(call))
time.sleep(0.2)
""",
    "sys.exit in a with block": """
with opened() as s:
    daemon(lambda: s.generate(STORY, max_new_tokens=3000))
    time.sleep(0.1)
    sys.exit(0)
""",
    "a garbage collection of the session by its policy": """
class Collecting(flashnext.Policy):
    def plan(self, counters):
        gc.collect()
        return flashnext.PlanOutput()
gc.disable()
s = opened(experts="offload", cache_lines=8, policy=Collecting())
handle = s.submit(STORY, max_new_tokens=200)
s.me = s
del s
assert handle.result().finish_reason in ("cancelled", "length")
""",
}


@pytest.mark.parametrize("what", AT_EXIT)
def test_the_interpreter_ends(what: str) -> None:
    for _ in range(2):
        started = time.monotonic()
        # InputError is what a thread gets that asks once more; nobody reads its traceback here.
        quiet = "threading.excepthook = lambda args: None\n"
        done = run_python(HEAD + quiet + AT_EXIT[what])
        assert (done.returncode, done.stderr) == (0, ""), what
        assert time.monotonic() - started < 20


# ---- after a fork -------------------------------------------------------------------------------

FORK = """
parent = opened()
handle = parent.submit(STORY, max_new_tokens=600)
queued = parent.submit(STORY, max_new_tokens=600)
BEFORE
time.sleep(0.1)
child = os.fork()
if child == 0:
    signal.alarm(15)  # a hang ends the child with a signal
    refused = 0
    for call in (
        lambda: parent.generate("Hi"),
        lambda: parent.submit("Hi"),
        lambda: parent.logits([1, 2]),
        lambda: queued.result(),
        lambda: list(handle),
    ):
        try:
            call()
        except InputError as error:
            refused += "process" in str(error)
    EXIT(refused)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), len(handle.result().tokens), len(queued.result().tokens))
"""


@pytest.mark.parametrize("leave", ["os._exit", "sys.exit", "parent.close() or sys.exit"])
@pytest.mark.parametrize("beside", ["", "daemon(handle.result)"])
def test_a_forked_child_is_refused_and_the_parent_goes_on(leave: str, beside: str) -> None:
    started = time.monotonic()
    done = run_python(HEAD + FORK.replace("BEFORE", beside).replace("EXIT", leave))
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 600 600\n", "")
    assert time.monotonic() - started < 20


def test_a_forked_child_may_open_a_session_of_its_own() -> None:
    script = """
import multiprocessing
parent = flashnext.Session(flashnext.demo_path(), device="host")
text = parent.generate("Add 17 and 14.").text

def work(queue):
    try:
        parent.generate("Hi")
    except InputError:
        with flashnext.Session(flashnext.demo_path(), device="host") as own:
            queue.put(own.generate("Add 17 and 14.").text)

context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
child = context.Process(target=work, args=(queue,))
child.start()
assert queue.get() == text == parent.generate("Add 17 and 14.").text
child.join(20)
assert child.exitcode == 0
"""
    done = run_python(HEAD + script)
    assert (done.returncode, done.stderr) == (0, "")


# ---- Ctrl-C and other signals -------------------------------------------------------------------

# A background job of a shell may have SIGINT ignored, which its children inherit.
LAUNCHER = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""

INTERRUPTED = """
s = opened()
try:
    print("running", flush=True)
    MODE
except KeyboardInterrupt:
    print("stopped", flush=True)
else:
    print("not stopped", flush=True)
s.stop_ids = [1495, 1493]
print(s.generate("Add 17 and 14.").text, flush=True)
"""

MODES = {
    "result": "s.submit(STORY, max_new_tokens=4000).result()",
    "result with a timeout": "s.submit(STORY, max_new_tokens=4000).result(60)",
    "iteration": "list(s.submit(STORY, max_new_tokens=4000))",
    "logits": "s.logits([5] * 4000); s.logits([5] * 4000); s.logits([5] * 4000)",
    "score": "s.score([5] * 4000); s.score([5] * 4000); s.score([5] * 4000)",
    "batch": "s.generate_batch([STORY] * 4, max_new_tokens=3000)",
    "queue": "h = s.submit(STORY, max_new_tokens=4000); s.generate(STORY, max_new_tokens=4000)",
    "another reader": "h = s.submit(STORY, max_new_tokens=4000); daemon(h.result); h.result()",
    "await": "asyncio.run(asyncio.wait_for(s.submit(STORY, max_new_tokens=4000), 60))",
}


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c(mode: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, HEAD + INTERRUPTED.replace("MODE", MODES[mode])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "running\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    if mode in ("queue", "another reader"):  # what still runs has the lane before the last call
        assert out.startswith("stopped\n") and out.endswith("17 + 14 = 31.\n"), (out, err)
    else:
        assert out == "stopped\n17 + 14 = 31.\n", (out, err)
    assert process.returncode == 0 and err == ""


def test_many_interrupts_lose_nothing() -> None:
    """Ctrl-C at any point of a reader: its result is there afterwards, and the session goes on."""
    script = """
import random
draw = random.Random(3)
s = opened(prefix_snapshots=2)
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
stopped = 0
for i in range(150):
    stream = s.generate(STORY, max_new_tokens=60, stream=True)
    signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0005, 0.15))
    try:
        for piece in stream: pass
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        stopped += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    stream.close()
    result = stream.result
    assert result.finish_reason in ("cancelled", "length")
    assert len(s.generate("Hi", max_new_tokens=2).tokens) == 2
assert stopped > 20, stopped
"""
    done = run_python(HEAD + script, timeout=150)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "call", ["logits([5] * 4000)", "score([5] * 4000)", "generate(STORY, max_new_tokens=3000)"]
)
def test_a_signal_handler_may_close_the_session(call: str) -> None:
    script = f"""
s = opened()
signal.signal(signal.SIGALRM, lambda *_: s.close())
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    assert s.{call}.finish_reason == "cancelled"
except InputError as error:
    assert "closed" in str(error) or "cancelled" in str(error)
try:
    s.stats()
except InputError:
    print("closed")
"""
    done = run_python(HEAD + script, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_close_while_a_walk_waits_for_its_turn() -> None:
    """Jobs that want the engine alone end with it, although nobody ran them."""
    script = """
from flashnext import _core
s = _core.Session(str(flashnext.demo_path()), device="host", mtp=True, window=0)
run = s.submit([{"prompt": [5], "max_new_tokens": 4000}])
def walk():
    try:
        s.mtp_logits([1, 2, 3])
    except InputError as error:
        print("closed" in str(error))
time.sleep(0.3)
thread = threading.Thread(target=walk, daemon=True)
thread.start()
time.sleep(0.3)
s.close()
thread.join(10)
assert not thread.is_alive()
"""
    done = run_python(HEAD + script, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
