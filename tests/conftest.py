"""For all tests: the ``gpu`` marker, hypothesis without deadlines, a pool of ranks, tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from ranks import Ranks

from fodit.testing.tiny import make

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may run the GPU tests with pytest alone
    pass
else:
    # Wall-clock limits on single examples say nothing on a shared machine. The rest stays as it is.
    settings.register_profile("fodit", settings(), deadline=None)
    settings.load_profile("fodit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip a test marked ``gpu`` or ``gpu(count)`` where there are fewer CUDA devices than that."""
    found = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = marker.args[0] if marker and marker.args else 1
        if marker and found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {found}"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Ranks]:
    """Four processes that stand in for ranks."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folder of the tiny checkpoint of a kind, made once."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(kind: str) -> str:
        path = root / kind
        return str(path if path.exists() else make(kind, path))

    return folder
