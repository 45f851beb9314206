"""Fixtures: the demo model, open sessions, and what this machine can run."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flashnext

# In the background of a script Ctrl-C is ignored, and what we start inherits that; tests of it do
# not care how they were started themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if flashnext.build_info()["cuda"] and len(flashnext.devices()) > 1:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and there is none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def demo() -> Path:
    return flashnext.demo_path()


@pytest.fixture(scope="session")
def session(demo: Path) -> Iterator[flashnext.Session]:
    with flashnext.Session(demo, device="host") as opened:
        yield opened


@pytest.fixture
def open_session(demo: Path) -> Iterator[Callable[..., flashnext.Session]]:
    """Opens further sessions on the demo (or another path), closed when the test ends."""
    opened: list[flashnext.Session] = []

    def make(path: Path | None = None, **options: Any) -> flashnext.Session:
        options.setdefault("device", "host")
        opened.append(flashnext.Session(demo if path is None else path, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.fixture
def hard_timeout() -> Iterator[None]:
    """Ends the whole run when a test hangs where no exception reaches it, such as with the GIL."""
    faulthandler.dump_traceback_later(150, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()
