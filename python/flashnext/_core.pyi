from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

class Error(Exception): ...
class InputError(Error, ValueError): ...
class CheckpointError(InputError): ...

class OutOfMemory(Error, MemoryError):
    space: str
    bytes: int

class DeviceError(Error, RuntimeError): ...
class LogicError(Error, RuntimeError): ...

def build_info() -> dict[str, Any]: ...
def devices() -> list[dict[str, Any]]: ...
def inspect(path: str) -> dict[str, Any]: ...

class Session:
    def __init__(
        self,
        path: str,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        **options: Any,
    ) -> None: ...
    @property
    def shape(self) -> dict[str, Any]: ...
    @property
    def window(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def notes(self) -> list[str]: ...
    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        min_p: float,
        seed: int,
        stop_ids: list[int],
        on_token: Callable[[int, int], bool] | None,
        on_prefill: Callable[[int, int, int], None] | None,
    ) -> list[dict[str, Any]]: ...
    def cancel(self) -> None: ...
    def logits(self, ids: list[int], chunk: int = 0) -> npt.NDArray[np.float32]: ...
    def score(self, ids: list[int]) -> npt.NDArray[np.float32]: ...
    def mtp_logits(self, ids: list[int]) -> npt.NDArray[np.float32]: ...
    def streams(self, ids: list[int]) -> npt.NDArray[np.float32]: ...
    def stats(self) -> dict[str, Any]: ...
    def record(self, path: str) -> None: ...
    def stop_recording(self) -> int: ...
    def close(self) -> str: ...

def exl3_reconstruct_sums(trellis: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]: ...
def exl3_codebook() -> npt.NDArray[np.uint16]: ...
def exl3_linear(
    trellis: npt.NDArray[np.int16],
    suh: npt.NDArray[np.uint16],
    svh: npt.NDArray[np.uint16],
    x: npt.NDArray[np.float32],
    levels: int = 32258,
    isa: str = "auto",
    threads: int = 1,
    bias: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]: ...
def ring_rows(
    rows: npt.NDArray[np.int16], bits: int, bias: npt.NDArray[np.uint16] | None = None
) -> npt.NDArray[np.float32]: ...
def elementwise(name: str, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...

# benchmarks, gates and synthetic checkpoints
def synthetic_session(
    like: str,
    layers: int = 0,
    *,
    synthetic_seed: int = 1,
    pool_bytes: int = ...,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Session: ...
def write_synthetic(
    folder: str,
    like: str,
    layers: int = 0,
    *,
    seed: int = 1,
    pool_bytes: int = ...,
    progress: Callable[[str, int, int], None] | None = None,
) -> None: ...
def plan(
    path: str,
    *,
    vram: int,
    ram: int,
    reserve: int = 0,
    window: int = 0,
    lanes: int = 1,
    chunk: int = 0,
    snapshots: int = 8,
    experts: str = "auto",
    cache_lines: int = 0,
    host_limit: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]: ...
def synthetic_disk_bytes(like: str, layers: int = 0) -> int: ...
def measure(
    session: Session,
    prompt: list[int],
    *,
    new_tokens: int = 32,
    chunk: int = 0,
    graphs: bool = True,
    profile: int = 0,
    feed: npt.NDArray[np.int32] | None = None,
    routing: npt.NDArray[np.int32] | None = None,
    resident_sets: int = 0,
    lanes: int = 1,
) -> dict[str, Any]: ...
def routing_of(trace: Trace) -> npt.NDArray[np.int32]: ...
def force_routing(session: Session, ids: list[int], rows: int = 1) -> None: ...
def warm_cache(session: Session, routing: npt.NDArray[np.int32]) -> None: ...
def host_bounds(threads: int = 0, isa: str = "auto") -> dict[str, Any]: ...
def cuda_bounds(ordinal: int = 0) -> dict[str, Any]: ...
def cuda_machine(ordinal: int = 0) -> dict[str, Any]: ...
def gate_names() -> dict[str, list[str]]: ...
def op_names() -> list[str]: ...
def run_op_gates(
    device: str,
    *,
    gate: str = "",
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]: ...
def run_engine_gates(
    session: Session,
    *,
    gate: str = "",
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]: ...

# policies and routing traces
def policy_names() -> list[str]: ...
def load_profile(
    path: str, fingerprint: int, layers: int, experts: int
) -> tuple[npt.NDArray[np.uint64] | None, str]: ...

class Trace:
    def __init__(self, path: str) -> None: ...
    @staticmethod
    def synthetic(
        layers: int,
        experts: int,
        top_k: int,
        *,
        line_bytes: int = 0,
        steps: int = 256,
        rows: int = 1,
        zipf: float = 0.6,
        recency: float = 0.5,
        window: int = 8,
        seed: int = 1,
        lines: int = 0,
        hit_rate: float = 0.0,
    ) -> tuple[Trace, float, float]: ...
    def info(self) -> dict[str, Any]: ...
    def uses(self) -> npt.NDArray[np.uint64]: ...
    def save(self, path: str) -> None: ...
    def replay(
        self,
        lines: int,
        policy: Any = None,
        *,
        seed: int = 0,
        plan_every: int = 16,
        plan_limit: float = 0.05,
        profile: npt.NDArray[np.uint64] | None = None,
        cpu_of: list[int] = ...,
    ) -> dict[str, Any]: ...
