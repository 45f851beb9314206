"""flashnext: runs EXL3 packs of Qwen3.8-Flash-Next, and gives one answer for one sequence.

Example:
    >>> import flashnext
    >>> with flashnext.Session(flashnext.demo_path()) as session:
    ...     print(session.generate("What is 20 - 6?").text)
    20 - 6 = 14.
"""

from flashnext._core import build_info, devices, inspect
from flashnext.errors import (
    CheckpointError,
    DeviceError,
    Error,
    InputError,
    LogicError,
    OutOfMemory,
)
from flashnext.generation import Generation, Timings
from flashnext.paths import demo_path
from flashnext.policy import CacheShape, Counters, PlanOutput, Policy
from flashnext.session import Session
from flashnext.stream import Stream
from flashnext.traces import Replay, Trace

__version__ = "0.1.0"

__all__ = [
    "CacheShape",
    "CheckpointError",
    "Counters",
    "DeviceError",
    "Error",
    "Generation",
    "InputError",
    "LogicError",
    "OutOfMemory",
    "PlanOutput",
    "Policy",
    "Replay",
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
