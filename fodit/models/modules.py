"""Modules whose parameters are used without calling them: which ones allow that, and where their weights are."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from accelerate.utils import align_module_device
from torch import nn

P = ParamSpec("P")
T = TypeVar("T")
HOOK = "fodit"  # prefix of the hooks' names in diffusers' registry


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the module computes `x @ weight.T + bias` with the weight as it lies there, and nothing else.

    Not so with adapters and quantised weights, nor where a hook brings the weight or watches the call (offloading).
    """
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not is_watched(module)


def why_called(modules: Mapping[str, nn.Module], device: str) -> str | None:
    """Why Linears of these names must be called, and not computed from their weights; None if they need not.

    Args:
        device: the type of their input's device.
    """
    if torch.is_autocast_enabled(device):
        return "torch.autocast is on"
    others = {name: module for name, module in modules.items() if not is_plain_linear(module)}
    hooks = {True: " with hooks or another forward", False: ""}
    return ", ".join(f"{name} is a {class_name(one)}{hooks[is_watched(one)]}" for name, one in others.items()) or None


def class_name(module: nn.Module) -> str:
    """With its package, since adapters name their classes like what they adapt: peft has a Linear of its own."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_watched(module: nn.Module) -> bool:
    """Whether more happens when the module is called than its class says: hooks of torch, diffusers or accelerate, or
    a forward that was put in its place, as some adapters do. fodit's own hooks do not count."""
    registry = getattr(module, "_diffusers_hook", None)
    names = list(registry.hooks) if registry is not None else []
    if any(not name.startswith(HOOK) for name in names) or hasattr(module, "_hf_hook"):
        return True
    return bool(module._forward_hooks or module._forward_pre_hooks) or (not names and has_other_forward(module))


def has_other_forward(module: nn.Module) -> bool:
    """Hooks that were removed leave the class's own forward behind, as the module's attribute."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def refuse_ignored(kind: type[nn.Module], norms: Mapping[str, nn.Module | None]) -> None:
    """Raise NotImplementedError for a norm that is more than a plain one of this kind: only that is computed.

    Offloading is no hindrance, see `with_weights`.
    """
    for name, norm in norms.items():
        if norm is None or (type(norm) is kind and (_is_offloaded(norm) or not is_watched(norm))):
            continue
        more = " with hooks or another forward" if is_watched(norm) else ""
        raise NotImplementedError(
            f"{name} is a {class_name(norm)}{more}: fodit computes a {kind.__name__} of q and k itself and would "
            "ignore it"
        )


def with_weights(function: Callable[P, T], *modules: nn.Module | None) -> Callable[P, T]:
    """`function`, with the modules' weights in place where offloading keeps them elsewhere between calls.

    accelerate's sequential and diffusers' group offloading bring a module's weights when the module is called; these
    are used without a call.
    """
    offloaded = [module for module in modules if module is not None and _is_offloaded(module)]
    if not offloaded:
        return function

    def with_them(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as stack:
            for module in offloaded:
                stack.enter_context(_weights_of(module))
            return function(*args, **kwargs)

    return with_them


def _is_offloaded(module: nn.Module) -> bool:
    return hasattr(module, "_hf_hook") or _group_offloading(module) is not None


def _group_offloading(module: nn.Module) -> Any:
    """diffusers' hook, or None."""
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook("group_offloading")


@contextmanager
def _weights_of(module: nn.Module) -> Iterator[None]:
    group = _group_offloading(module)
    if group is None:
        with align_module_device(module):
            yield
        return
    group.pre_forward(module)
    try:
        yield
    finally:
        group.post_forward(module, None)
