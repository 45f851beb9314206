"""flashnext: runs EXL3 packs of Qwen3.8-Flash-Next, and gives one answer for one sequence.

Example:
    >>> import flashnext
    >>> with flashnext.Session(flashnext.demo_path()) as session:
    ...     print(session.generate("What is 20 - 6?").text)
    20 - 6 = 14.
"""

import atexit as _atexit

from flashnext import _core
from flashnext._core import build_info, devices
from flashnext.errors import (
    CheckpointError,
    DeviceError,
    Error,
    InputError,
    LogicError,
    OutOfMemory,
    RequestFailed,
)
from flashnext.generation import Generation, Timings
from flashnext.handle import Handle
from flashnext.pack import inspect
from flashnext.paths import demo_path
from flashnext.policy import CacheShape, Counters, PlanOutput, Policy
from flashnext.session import Session
from flashnext.stream import Stream
from flashnext.traces import Replay, Trace

__version__ = "0.1.0"

# Threads that wait for the engine must be back before the interpreter goes.
_atexit.register(_core.shutdown)

__all__ = [
    "CacheShape",
    "CheckpointError",
    "Counters",
    "DeviceError",
    "Error",
    "Generation",
    "Handle",
    "InputError",
    "LogicError",
    "OutOfMemory",
    "PlanOutput",
    "Policy",
    "Replay",
    "RequestFailed",
    "Session",
    "Stream",
    "Timings",
    "Trace",
    "__version__",
    "build_info",
    "demo_path",
    "devices",
    "inspect",
]
