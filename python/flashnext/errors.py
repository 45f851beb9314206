"""The error ladder: four kinds, so that a caller can tell what to do next.

Every exception of the package derives from :class:`Error`:

* :class:`InputError` (also a ``ValueError``): the request is wrong; change it.
  :class:`CheckpointError`: the checkpoint folder is wrong; mend it.
* :class:`OutOfMemory` (also a ``MemoryError``): ``space`` and ``bytes`` say what ran out.
* :class:`DeviceError` (also a ``RuntimeError``): the device failed; open a new session.
* :class:`LogicError` (also a ``RuntimeError``): a bug of the engine; report it.
"""

from flashnext._core import (
    CheckpointError,
    DeviceError,
    Error,
    InputError,
    LogicError,
    OutOfMemory,
)

__all__ = [
    "CheckpointError",
    "DeviceError",
    "Error",
    "InputError",
    "LogicError",
    "OutOfMemory",
]
