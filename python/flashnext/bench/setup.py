"""What a bench is asked to do, and the sessions it opens."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashnext import _core, checks, evidence, options
from flashnext.errors import InputError

Progress = Callable[[str, int, int], None]

_FIRST_RANDOM_ID = 100
WARMUP_TOKENS = 4  # decode steps at the head of a run that are measured, but not counted


@dataclass(frozen=True)
class Setup:
    """Every option of a bench, by the names of the command line."""

    like: str = "flash-next"  # random weights of these dimensions, unless `model` names a folder
    layers: int = 12
    model: str | None = None
    device: str = "auto"
    context: tuple[int, ...] = (2048,)
    tokens: int = 64
    lanes: int = 1  # requests that decode together
    token_wait: float = 0.2  # seconds that one of them should wait while a prompt is read
    repeats: int = 3
    chunk: int = 2048
    threads: int = 0
    levels: int = 32258
    isa: str = "auto"
    seed: int = 1
    cold: bool = False
    memory_budget: int = 0
    pool_bytes: int = 256 << 20
    profile: int = 3  # measurements an op family; 0: no stage times
    capabilities: tuple[str, ...] = ()
    # Experts in host memory; see the command line.
    experts: str = "auto"
    vram: float | None = None  # GB of 2**30 bytes, in place of memory_budget
    ram: float | None = None
    lines: int | None = None
    cpu_misses: str = "auto"
    cpu_threads: int = 0
    policy: str | None = None
    profile_file: str | None = None
    link: float = 0.0  # GB/s (10**9 bytes) of a slower link that is played; 0: off
    trace: str | None = None
    hit_rate: tuple[float, ...] = ()  # a run for each; empty: the model's own routing
    zipf: float = 0.6
    random_ids: bool = False
    command: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Refuses what makes no sense before anything large is opened."""
        if not self.context or min(self.context) < 1:
            raise InputError(f"context = {self.context}: give one or more prompt lengths above 0")
        for name, least in (
            ("tokens", 1),
            ("lanes", 1),
            ("repeats", 1),
            ("chunk", 1),
            ("profile", 0),
        ):
            if getattr(self, name) < least:
                raise InputError(f"{name} = {getattr(self, name)}: must be at least {least}")
        checks.whole("layers", self.layers, 0, checks.MAX_INT)
        checks.whole("seed", self.seed, 0, checks.MAX_SEED)
        for name in ("tokens", "lanes", "repeats", "chunk", "profile"):
            checks.whole(name, getattr(self, name), 0, checks.MAX_INT)
        if self.memory_budget < 0 or self.pool_bytes < 1 << 20:
            raise InputError("memory_budget must not be negative, pool_bytes at least 1 MiB")
        self._check_experts()

    def _check_experts(self) -> None:
        options.limit_bytes(self.vram, self.memory_budget)
        options.memory_bytes("ram", self.ram)
        options.misses_word(self.cpu_misses)
        if checks.real("link", self.link, "GB a second, 0 for off") < 0:
            raise InputError(f"link is {self.link}, expected GB a second, 0 for off")
        for given in self.hit_rate:
            rate = checks.real("hit_rate", given, "a share above 0 and below 1")
            if not 0 < rate < 1:
                raise InputError(f"hit_rate is {rate}, expected a share above 0 and below 1")
        if self.hit_rate and self.lanes > 1:
            raise InputError(
                f"lanes is {self.lanes}: routing is replayed for one lane; leave out hit_rate"
            )
        if self.trace is not None and max(len(self.context), len(self.hit_rate)) > 1:
            raise InputError("trace is the file of one run: give one context, and one hit rate")

    def requested(self) -> dict[str, Any]:
        """For the receipt."""
        asked = {key: value for key, value in asdict(self).items() if key != "command"}
        for name in ("trace", "profile_file"):
            if asked[name] is not None:
                asked[name] = Path(asked[name]).name
        return asked

    @property
    def memory_limit(self) -> int:
        """Bytes that may be allocated on the device; 0: all that is there."""
        return options.limit_bytes(self.vram, self.memory_budget)

    @property
    def window(self) -> int:
        """Positions that the longest run needs, in whole pages.

        Lanes share a pool of one window and a quarter of it for each further lane: four times the
        run's length lets all of them be as long.
        """
        longest = (max(self.context) + self.tokens + WARMUP_TOKENS + 63) // 64 * 64
        return longest if self.lanes == 1 else 4 * longest

    def name(self) -> str:
        """The model, for people."""
        if self.model is not None:
            return Path(self.model).resolve().name
        return f"synthetic {self.like}, {self.layers or 'all'} layers"

    def checkpoint(self) -> str:
        """A hash that two runs share if and only if they ran the same weights."""
        digest = hashlib.sha256()
        if self.model is None:
            digest.update(f"{self.like} {self.layers} {self.seed} {self.pool_bytes}".encode())
            return "synthetic:" + digest.hexdigest()[:16]
        folder = Path(self.model)
        for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            with path.open("rb") as file:
                head = file.read(8) if path.suffix == ".safetensors" else file.read()
                digest.update(head)
                if path.suffix == ".safetensors":
                    digest.update(file.read(struct.unpack("<Q", head)[0]))
        return "sha256:" + digest.hexdigest()[:16]

    def open(self, progress: Progress | None = None) -> tuple[_core.Session, int]:
        """A session for the longest run, and the nanoseconds that opening it took."""
        given: dict[str, Any] = {
            "device": self.device,
            "window": self.window,
            "threads": self.threads,
            "levels": self.levels,
            "isa": self.isa,
            "chunk": self.chunk,
            "lanes": self.lanes,
            "token_wait": checks.seconds("token_wait", self.token_wait),
            "prefix_snapshots": 0,
            "memory_limit": self.memory_limit,
            "capabilities": [*self.capabilities, *evidence.accepted_capabilities()],
            "link_limit": self.link * 1e9,
            "forced_routing": True,
            **options.expert_options(
                Path(self.model or ""),
                experts=self.experts,
                ram_gb=self.ram,
                cache_lines=self.lines,
                cpu_misses=self.cpu_misses,
                cpu_threads=self.cpu_threads,
                policy=self.policy,
                profile=False if self.profile_file is None else self.profile_file,
                plan_every=16,
                lockstep=False,
                trace=self.trace,
            ),
        }
        start = time.perf_counter_ns()
        if self.model is None:
            session = _core.synthetic_session(
                self.like,
                self.layers,
                synthetic_seed=self.seed,
                pool_bytes=self.pool_bytes,
                progress=progress,
                **given,
            )
        else:
            session = _core.Session(self.model, progress=progress, **given)
        return session, time.perf_counter_ns() - start

    def prompt(self, session: _core.Session, length: int) -> list[int]:
        """Random ids, the same for a seed and a length."""
        vocab = session.shape["vocab"]
        low = min(_FIRST_RANDOM_ID, vocab - 1)
        generator = np.random.default_rng([self.seed, length])
        return [int(i) for i in generator.integers(low, vocab, size=length)]


def drop_page_cache(folder: str) -> int:
    """Asks the system to forget the files of a checkpoint; the bytes it was asked to forget."""
    total = 0
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as file, contextlib.suppress(OSError):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += path.stat().st_size
    return total
