"""xDiT's Ulysses for a model in memory, with the calls of its own examples. Written for xfuser 0.7.0.

xfuser is imported where it is used: fodit does not need it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fodit.bench.model import Model, twin


@contextmanager
def pipeline(model: Model, ulysses: int) -> Iterator[Any]:
    """A pipeline on a twin of the model, to be used inside."""
    from xfuser import xFuserArgs
    from xfuser.core.distributed import init_distributed_environment
    from xfuser.core.distributed.parallel_state import destroy_model_parallel

    init_distributed_environment()  # takes the process group that there is
    config, _ = xFuserArgs(model=type(model.plain).__name__, ulysses_degree=ulysses).create_config()
    try:
        yield _wan(model, config) if model.wan else _CogVideoX(model, config)
    finally:
        destroy_model_parallel()


def _wan(model: Model, config: Any) -> Any:
    """As xfuser/model_executor/models/runner_models/wan.py: diffusers' pipeline around xDiT's transformer."""
    from xfuser.core.distributed import initialize_runtime_state
    from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

    pipe = twin(model.plain, xFuserWanTransformer3DWrapper)
    initialize_runtime_state(pipe, config)
    return pipe


class _CogVideoX:
    """As examples/cogvideox_example.py. The last rank has the result, and gives it to the others here."""

    def __init__(self, model: Model, config: Any) -> None:
        from xfuser import xFuserCogVideoXPipeline

        self._pipe = xFuserCogVideoXPipeline(twin(model.plain), config)

    def __call__(self, **call: Any) -> Any:
        output = self._pipe(**call)
        if dist.is_initialized():
            if not isinstance(output.frames, torch.Tensor):
                output.frames = torch.empty_like(call["latents"])
            dist.broadcast(output.frames.contiguous(), src=dist.get_world_size() - 1)
        return output
