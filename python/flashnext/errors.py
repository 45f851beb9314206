"""The error ladder: four kinds, so that a caller can tell what to do next.

Every exception of the package derives from :class:`Error`:

* :class:`InputError` (also a ``ValueError``): the request is wrong; change it.
  :class:`CheckpointError`: the checkpoint folder is wrong; mend it.
* :class:`OutOfMemory` (also a ``MemoryError``): ``space`` and ``bytes`` say what ran out.
* :class:`DeviceError` (also a ``RuntimeError``): the device failed; open a new session.
* :class:`LogicError` (also a ``RuntimeError``): a bug of the engine; report it.

:class:`RequestFailed` is none of these: one request ended without an answer, and all else goes on.
"""

from flashnext._core import (
    CheckpointError,
    DeviceError,
    Error,
    InputError,
    LogicError,
    OutOfMemory,
)


class RequestFailed(Error, RuntimeError):
    """One request failed, e.g. its logits were no numbers; the session and other requests go on."""


__all__ = [
    "CheckpointError",
    "DeviceError",
    "Error",
    "InputError",
    "LogicError",
    "OutOfMemory",
    "RequestFailed",
]
