"""CFG parallelism: the conditional and the unconditional pass of guidance on different ranks."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.hooks import ModelHook
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from fodit.models.sequence import named_arguments
from fodit.ops.communicator import Communicator, all_gather_single


class SplitBatch(ModelHook):
    """For models that make both passes in one call with a batch of two halves (CogVideoX): each rank takes a half.

    A batch that does not halve (guidance off) is computed whole on both ranks; `idle` counts those calls.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm
        self._halved = False
        self.idle = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        given = named_arguments(module, args, kwargs)
        batch = given["hidden_states"].shape[0]
        self._halved = batch % 2 == 0
        if self._halved:
            for name, value in given.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == batch:
                    given[name] = value.chunk(2)[self._comm.rank]
        else:
            self.idle += 1
        return (), given

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if not self._halved:
            return output
        sample = output[0]
        whole = self._comm.gather_rows(sample, (sample.shape[0],) * 2).wait()
        return (whole,) if isinstance(output, tuple) else Transformer2DModelOutput(sample=whole)


class SplitPasses(ModelHook):
    """For models that are called twice a step, conditional first (Wan): each rank computes one of the calls.

    The other call returns a placeholder, and when both are done one exchange fills it in place. Until then it holds
    NaN, so that a pipeline which used it too early could not go unnoticed.

    Args:
        comm: of the two ranks that share the passes.
        guided: whether the step that is running makes both passes; `idle` counts calls where it does not.
    """

    def __init__(self, comm: Communicator, guided: Callable[[], bool]) -> None:
        super().__init__()
        self._comm, self._guided = comm, guided
        self._first: torch.Tensor | None = None  # result of the conditional call, while the other one is due
        self.idle = 0

    def reset(self) -> None:
        """Forget a step that was left half-way."""
        self._first = None

    def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        forward = self.fn_ref.original_forward
        if not self._guided():
            self.idle += 1
            return forward(*args, **kwargs)
        number = 0 if self._first is None else 1
        given = named_arguments(module, args, kwargs)
        if number == self._comm.rank:
            output = forward(**given)
        else:
            latents = given["hidden_states"]
            shape = list(latents.shape)
            shape[1] = module.config.out_channels
            sample = torch.full(shape, torch.nan, dtype=latents.dtype, device=latents.device)
            returns_dict = given.get("return_dict", True)
            output = Transformer2DModelOutput(sample=sample) if returns_dict else (sample,)
        if number == 0:
            self._first = output[0]
        else:
            self._exchange(self._first, output[0])
            self._first = None
        return output

    def _exchange(self, first: Any, second: torch.Tensor) -> None:
        if first.shape != second.shape or first.dtype != second.dtype:
            raise RuntimeError(
                f"the conditional pass gives {tuple(first.shape)} {first.dtype}, the unconditional one "
                f"{tuple(second.shape)} {second.dtype}: CFG parallelism needs the same; use cfg=1"
            )
        mine, other = (first, second) if self._comm.rank == 0 else (second, first)
        both = mine.new_empty(2, *mine.shape)
        self._comm.start(all_gather_single, both, mine.contiguous().unsqueeze(0)).wait()
        other.copy_(both[1 - self._comm.rank])
