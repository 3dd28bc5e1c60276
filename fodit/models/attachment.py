"""attach() and detach(): an unmodified diffusers transformer on several ranks, and back."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.utils.torch_utils import unwrap_module
from torch import nn

from fodit.kernels import rows
from fodit.models import cogvideox, wan
from fodit.models.family import ModelFamily
from fodit.models.guidance import SplitBatch, SplitPasses
from fodit.models.modules import HOOK, has_other_forward
from fodit.models.sequence import HeadGroups, ShardedSequence
from fodit.parallel import ProcessGroups

FAMILIES = {family.transformer: family for family in (cogvideox.FAMILY, wan.FAMILY)}


class Guard(ModelHook):
    """On the transformer: refuse what would silently be ignored or give ranks different control flow."""

    def __init__(self, attachment: "Attachment") -> None:
        super().__init__()
        self._attachment = attachment

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        for attention in self._attachment.attentions:
            if attention.processor is not self._attachment.processor:
                raise RuntimeError(
                    f"an attention processor was replaced by {type(attention.processor).__name__} after attach(); "
                    "call detach() first (fuse_qkv_projections() and set_attn_processor() replace processors)"
                )
        if self._attachment.groups.size > 1 and (found := stateful_hooks(module)):
            raise RuntimeError(
                f"a step cache is enabled on the transformer ({found[0]}): on several ranks each would decide for "
                "itself what to skip; call transformer.disable_cache() or remove its hooks"
            )
        refuse_training(module, [*args, *kwargs.values()])
        return args, kwargs


def refuse_training(transformer: nn.Module, given: Iterable[Any]) -> None:
    """Collectives and kernels here have no backward pass; without this check gradients would be silently wrong."""
    if not torch.is_grad_enabled():
        return
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    if any(one.requires_grad for one in (*tensors, *transformer.parameters())):
        raise RuntimeError("an attached transformer only runs inference: call it under torch.no_grad()")


def stateful_hooks(module: nn.Module) -> list[str]:
    """Names of diffusers' hooks that remember something from step to step, as all step caches do."""
    registries = (getattr(one, "_diffusers_hook", None) for one in module.modules())
    hooks = (pair for registry in registries if registry is not None for pair in registry.hooks.items())
    return [name for name, hook in hooks if hook._is_stateful and not name.startswith(HOOK)]


class Attachment:
    """A transformer that runs on the ranks of `groups`. Made by `attach()`.

    Attributes:
        notes: what does not run overlapped, and why. Read it after a call.
    """

    def __init__(
        self,
        transformer: nn.Module,
        groups: ProcessGroups,
        guided: Callable[[], bool] | None = None,
        head_groups: HeadGroups = None,
    ) -> None:
        self.family = family_of(type(transformer))
        self.transformer, self.groups = transformer, groups
        self.attentions: list[Any] = self.family.self_attentions(transformer)
        self._before = [attention.processor for attention in self.attentions]
        config: Any = transformer.config
        self.sequence = ShardedSequence(
            groups.ulysses, config.num_attention_heads, config.attention_head_dim, head_groups, groups.parallel.speeds
        )
        self.processor = self.family.processor(self.sequence)
        self.processor._attention_backend = getattr(self._before[0], "_attention_backend", None)
        self._passes: SplitBatch | SplitPasses | None = None

        self._fused = self.family.fused_blocks(transformer, self.sequence)
        hooks: list[tuple[nn.Module, ModelHook]] = [*self._fused]  # first: the others surround a block's forward
        hooks += self.family.sequence_hooks(transformer, self.sequence)
        if groups.cfg.size > 1:
            self._passes = self._split_guidance(guided)
            hooks.append((transformer, self._passes))
        hooks.append((transformer, Guard(self)))
        self._hooks = [(module, f"{HOOK}.{type(hook).__name__}") for module, hook in hooks]
        for attention in self.attentions:
            attention.set_processor(self.processor)
        for (module, hook), (_, name) in zip(hooks, self._hooks, strict=True):
            HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)
        self._forwards = [(module, module.forward) for module in dict.fromkeys(module for module, _ in hooks)]

    def _split_guidance(self, guided: Callable[[], bool] | None) -> SplitBatch | SplitPasses:
        if self.family.passes_in_one_call:
            return SplitBatch(self.groups.cfg)
        if guided is None:
            raise ValueError(
                "cfg=2 with Wan needs guided=, a function that says whether a step makes both passes; for example "
                "attach(pipe.transformer, groups, guided=lambda: pipe.do_classifier_free_guidance)"
            )
        return SplitPasses(self.groups.cfg, guided)

    @property
    def intact(self) -> bool:
        """Whether all hooks are where they were put, or inside of what accelerate put around them later. Its
        offloading, when it is set up anew after a pipeline call or for an adapter, gives modules back the forward that
        they had before it."""
        return all(forward in (module.forward, _inner(module)) for module, forward in self._forwards)

    def reset(self) -> None:
        """Before a pipeline call: forget a step that was broken off, and what the last call had to note."""
        for _, hook in self._fused:
            hook.reasons.clear()
        if isinstance(self._passes, SplitPasses):
            self._passes.reset()
        if self._passes is not None:
            self._passes.idle = 0

    @property
    def notes(self) -> list[str]:
        found = []
        if self._passes is not None and self._passes.idle:
            found.append(
                f"cfg=2, but guidance made one pass in {self._passes.idle} calls: both halves of the ranks computed "
                "the same; use cfg=1"
            )
        found += sorted(self.groups.cfg.fallbacks | self.groups.ulysses.fallbacks)
        found += sorted({reason for _, hook in self._fused for reason in hook.reasons})
        if self.groups.device.type == "cuda" and (reason := rows.why_eager(self.groups.device)) is not None:
            found.append(f"row operations run in eager torch: {reason}")
        return found

    def detach(self) -> None:
        """Give the transformer back as it was: its own processors, none of the hooks. A second call does nothing."""
        for attention, processor in zip(self.attentions, self._before, strict=True):
            if attention.processor is self.processor:
                attention.set_processor(processor)
        others = [
            (module, module.forward, forward) for module, forward in self._forwards if module.forward is not forward
        ]
        for module, name in reversed(self._hooks):  # each restores what was there when it came
            HookRegistry.check_if_exists_or_initialize(module).remove_hook(name, recurse=False)
        for module in dict.fromkeys(module for module, _ in self._hooks):
            _forget(module)
        for module, outer, ours in others:  # somebody else's, with or without ours inside
            if _inner(module) is ours:
                module._old_forward = module.forward  # type: ignore[assignment]
            module.forward = outer
        self._hooks, self._forwards = [], []


def _forget(module: nn.Module) -> None:
    """Of a registry without hooks, and of the class's own forward, which removed hooks leave as an attribute."""
    registry: Any = module._diffusers_hook
    if registry.hooks:
        return
    del module._diffusers_hook
    if not has_other_forward(module):
        vars(module).pop("forward", None)


def _inner(module: nn.Module) -> Any:
    """The forward inside of accelerate's hook, if there is one."""
    return getattr(module, "_old_forward", None)


def attach(
    transformer: nn.Module,
    groups: ProcessGroups,
    *,
    guided: Callable[[], bool] | None = None,
    head_groups: HeadGroups = None,
) -> Attachment:
    """Let a diffusers CogVideoX or Wan transformer run on several ranks. Every rank calls it as before.

    All ranks pass the same inputs and get the whole output, equal to one process's. Nothing of diffusers is copied
    or patched: the self-attentions get a processor of fodit's, and diffusers' own hooks shard the sequence at the
    first block and gather it after the last projection.

    Args:
        transformer: CogVideoXTransformer3DModel or WanTransformer3DModel, weights on the rank's device; also wrapped
            by torch.compile.
        groups: process groups with their degrees.
        guided: for Wan with cfg=2, whether the step that is running makes both passes of guidance.
        head_groups: parts in which attention heads are exchanged, a number or their relative sizes; None chooses.

    Returns:
        The attachment; its `detach()` undoes everything. Call its `reset()` after a step that was broken off, where
        Wan has made only one of the passes of guidance.

    Raises:
        TypeError: a transformer of another class.
        ValueError: the transformer is attached already, or degrees and heads do not fit.
    """
    transformer = unwrap_module(transformer)
    registry = getattr(transformer, "_diffusers_hook", None)
    if registry is not None and any(name.startswith(HOOK) for name in registry.hooks):
        raise ValueError("this transformer is attached already: call detach() on its attachment or pipeline first")
    return Attachment(transformer, groups, guided, head_groups)


def family_of(kind: type) -> ModelFamily:
    """What fodit knows of a transformer class. Raises TypeError for one that it cannot run."""
    if kind not in FAMILIES:
        known = ", ".join(one.__name__ for one in FAMILIES)
        raise TypeError(f"fodit cannot run a {kind.__name__}; supported are {known}")
    return FAMILIES[kind]
