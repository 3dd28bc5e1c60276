"""attach() and detach() on bare transformers."""

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from diffusers import AutoencoderKLWan, CogVideoXTransformer3DModel, FirstBlockCacheConfig, WanTransformer3DModel
from diffusers.hooks import apply_first_block_cache
from torch import nn

from fodit.models import attach
from fodit.parallel import ParallelConfig, ProcessGroups, initialise
from fodit.tune.planner import Planner
from fodit.tune.profile import shipped

CPU = torch.device("cpu")


def groups(**degrees):
    control = initialise(CPU, 60)
    world = control.size() if control is not None else 1
    return ProcessGroups(ParallelConfig(**degrees).resolve(world, 4), CPU)


def wan():
    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=12, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2
    ).eval()


def cogvideox():
    torch.manual_seed(0)
    return CogVideoXTransformer3DModel(
        num_attention_heads=4, attention_head_dim=8, text_embed_dim=16, num_layers=2, sample_width=8, sample_height=8,
        sample_frames=5, max_text_seq_length=6, time_embed_dim=16,
    ).eval()  # fmt: skip


def inputs(transformer):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    if isinstance(transformer, WanTransformer3DModel):
        latents, text, times = draw(1, 16, 2, 8, 10), draw(1, 7, 16), torch.tensor([500])
    else:
        latents, text, times = draw(2, 2, 16, 8, 8), draw(2, 6, 16), torch.tensor([500, 500])
    return {"hidden_states": latents, "timestep": times, "encoder_hidden_states": text}


def snapshot(transformer):
    """Everything attach() may touch: processors, forwards and hooks of every module."""
    return {
        name: (
            getattr(module, "processor", None),
            getattr(module.forward, "__func__", module.forward),
            tuple(module._diffusers_hook.hooks) if hasattr(module, "_diffusers_hook") else (),
            module._forward_hooks.copy(),
            tuple((key, parameter.data_ptr()) for key, parameter in module.named_parameters(recurse=False)),
        )
        for name, module in transformer.named_modules()
    }


def attach_and_detach(make):
    transformer = make()
    given = inputs(transformer)
    with torch.no_grad():
        wanted = transformer(**given).sample
        before = snapshot(transformer)
        attachment = attach(transformer, groups(cfg=1))
        assert snapshot(transformer) != before
        attached = transformer(**given).sample
        as_tuple = transformer(**given, return_dict=False)[0]
        assert torch.equal(attached, as_tuple)
        attachment.detach()
        attachment.detach()
        assert snapshot(transformer) == before
        assert torch.equal(transformer(**given).sample, wanted)
    return float((attached - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("make", [wan, cogvideox])
@pytest.mark.parametrize("ranks", [1, 3])
def test_detach_gives_the_untouched_transformer_back(pool, make, ranks):
    assert max(pool.run(ranks, attach_and_detach, make)) < 1e-5


def detached_from_two_passes(make):
    """Two hooks on one module, of which the later one has a forward of its own."""
    transformer = make()
    before = snapshot(transformer)
    with torch.no_grad():
        attachment = attach(transformer, groups(cfg=2), guided=lambda: False)
        transformer(**inputs(transformer))
        attachment.detach()
    return snapshot(transformer) == before


def test_detach_with_cfg_2(pool):
    assert pool.run(4, detached_from_two_passes, wan) == [True] * 4


def given_otherwise(make, parallel, options, change):
    """The largest error of what an attached transformer returns, and its notes."""
    transformer = make()
    given = inputs(transformer)
    change(transformer, given)
    made = ProcessGroups(ParallelConfig(**parallel).resolve(initialise(CPU, 60).size(), 4), CPU)
    made.ulysses.planner = Planner(shipped()["h200-x2-no-p2p"])
    with torch.no_grad():
        wanted = transformer(**given).sample
        attachment = attach(transformer, made, **options)
        found = transformer(**given).sample
    return float((found - wanted).abs().max()), attachment.notes


def nothing(transformer, given):
    pass


def one_timestep_for_two(transformer, given):
    for name in ("hidden_states", "encoder_hidden_states"):
        given[name] = torch.cat([given[name][:1], 2 * given[name][:1]])
    given["timestep"] = torch.tensor([500])


def halved_attention(transformer, given):
    for block in getattr(transformer, "transformer_blocks", None) or transformer.blocks:
        block.attn1.register_forward_hook(
            lambda _module, _args, out: out / 2 if torch.is_tensor(out) else tuple(one / 2 for one in out)
        )


@pytest.mark.parametrize(
    ("parallel", "options", "change", "note"),
    [
        ({"cfg": 1}, {"head_groups": [1, 1]}, nothing, None),
        ({"cfg": 1, "speeds": [2, 1]}, {}, nothing, None),
        ({"cfg": 1}, {}, one_timestep_for_two, None),
        ({"cfg": 1}, {}, halved_attention, "attention has hooks"),
    ],
)
@pytest.mark.parametrize("make", [wan, cogvideox])
def test_what_else_may_be_given(pool, make, parallel, options, change, note):
    for error, notes in pool.run(2, given_otherwise, make, parallel, options, change):
        assert error < 1e-5
        assert note is None or make is wan or any(note in one for one in notes), notes


def under_autocast(make):
    transformer = make()
    given = inputs(transformer)
    made = groups(cfg=1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = transformer(**given).sample
        attachment = attach(transformer, made)
        found = transformer(**given).sample
    return float((found - wanted).norm() / wanted.norm()), attachment.notes


@pytest.mark.parametrize("make", [wan, cogvideox])
def test_autocast_is_right_and_said(pool, make):
    for error, notes in pool.run(2, under_autocast, make):
        assert error < 0.02
        assert sum("torch.autocast is on" in one for one in notes) == 2


def with_own_projection(make):
    """A projection that is not a plain Linear, as a LoRA adapter makes it."""

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    transformer = make()
    for module in transformer.modules():
        if hasattr(module, "to_q"):
            module.to_q = Adapted(module.to_q)
    given = inputs(transformer)
    with torch.no_grad():
        wanted = transformer(**given).sample
        attachment = attach(transformer, groups(cfg=1))
        attached = transformer(**given).sample
    return float((attached - wanted).norm() / wanted.norm()), attachment.notes


@pytest.mark.parametrize("make", [wan, cogvideox])
def test_other_projections_are_right_and_said(pool, make):
    for error, notes in pool.run(2, with_own_projection, make):
        assert error < 1e-5
        assert any("to_q is a " in note and "Adapted" in note for note in notes)


def test_a_changed_weight_counts():
    """Fused LoRA weights, for example: nothing of a weight is kept at attach()."""
    transformer = cogvideox()
    given = inputs(transformer)
    with torch.no_grad():
        attachment = attach(transformer, groups(cfg=1))
        transformer(**given)
        transformer.transformer_blocks[0].attn1.to_q.weight.data = torch.randn(32, 32)
        attached = transformer(**given).sample
        attachment.detach()
        assert torch.allclose(transformer(**given).sample, attached, atol=1e-5)


def planned(make, groups_of, calls):
    """With a planner, whose head groups and calls of attention are not the default."""
    transformer = make()
    given = inputs(transformer)
    with torch.no_grad():
        wanted = transformer(**given).sample
        made = groups(cfg=1)
        made.ulysses.planner = Planner(shipped()["h200-x2-no-p2p"])
        made.ulysses.planner.head_groups = lambda *_: groups_of
        made.ulysses.planner.attention_calls = lambda _: calls
        attach(transformer, made)
        found = transformer(**given).sample
    return torch.allclose(found, wanted, atol=1e-5), made.ulysses.planner.asked


@pytest.mark.parametrize(("groups_of", "calls"), [((1, 1), ((1,), (1,))), ((1,), ((1, 1),))])
@pytest.mark.parametrize("make", [wan, cogvideox])
def test_planned(pool, make, groups_of, calls):
    """Four heads on two ranks: in two groups, or in one that is attended in two calls."""
    for right, asked in pool.run(2, planned, make, groups_of, calls):
        assert right
        slabs = "serial" if len(groups_of) == 1 else "slabs 2"
        assert any("gemm + all_to_all" in line and slabs in line for line in asked)


def watched_block(watch):
    """What a forward hook on the first block sees, with and without fodit; and the transformer's output."""
    transformer = cogvideox()
    given = inputs(transformer)
    seen = []
    see = lambda _module, _args, output: seen.append(output[0].clone())  # noqa: E731
    with torch.no_grad():
        handles = [transformer.transformer_blocks[0].register_forward_hook(see)] if watch else []
        wanted = transformer(**given).sample
        for handle in handles:
            handle.remove()
        attach(transformer, groups(cfg=1))
        if watch:
            transformer.transformer_blocks[0].register_forward_hook(see)
        found = [transformer(**given).sample for _ in range(2)]
    return [torch.allclose(one, wanted, atol=1e-5) for one in found], [one.shape[1] for one in seen], seen


@pytest.mark.parametrize("watch", [False, True])
def test_blocks_hand_over_work_only_where_nobody_looks(pool, watch):
    results = pool.run(2, watched_block, watch)
    for right, _, _ in results:
        assert all(right)
    if watch:
        (_, sizes, first), (_, _, second) = results
        whole, parts = first[0], torch.cat([first[1], second[1]], dim=1)
        assert sizes[0] == parts.shape[1] and torch.allclose(parts, whole, atol=1e-5)


@pytest.mark.parametrize("make", [wan, cogvideox])
def test_offloaded_weights_of_norms(make):
    """accelerate's sequential offloading leaves meta tensors between calls; norms of q and k are used without one."""
    transformer = make()
    given = inputs(transformer)
    with torch.no_grad():
        attachment = attach(transformer, groups())
        wanted = transformer(**given).sample
        attachment.detach()
        cpu_offload(transformer, execution_device=torch.device("cpu"))
        attachment = attach(transformer, groups())
        assert attachment.attentions[0].norm_q.weight.is_meta
        assert torch.equal(transformer(**given).sample, wanted)


@pytest.mark.parametrize("make", [wan, cogvideox])
def test_offloaded_while_attached(make):
    """accelerate's forward is around fodit's, and stays when that is taken away."""
    transformer = make()
    given = inputs(transformer)
    with torch.no_grad():
        wanted = transformer(**given).sample
        attachment = attach(transformer, groups())
        cpu_offload(transformer, CPU)
        assert attachment.intact and torch.allclose(transformer(**given).sample, wanted, atol=1e-5)
        attachment.detach()
        assert torch.allclose(transformer(**given).sample, wanted, atol=1e-5)
        remove_hook_from_module(transformer, recurse=True)
        assert torch.allclose(transformer(**given).sample, wanted, atol=1e-5)
    assert all(one.processor is not attachment.processor for one in attachment.attentions)


@pytest.mark.parametrize("make", [wan, cogvideox])
def test_weights_of_norms_from_the_disk(make, tmp_path):
    """Group offloading by leaves brings a module's weights when it is called; some are used without a call."""
    transformer = make()
    given = inputs(transformer)
    with torch.no_grad():
        for name, weight in transformer.named_parameters():
            if "norm_q" in name or "norm_k" in name:
                weight.mul_(3)
        wanted = transformer(**given).sample
        transformer.enable_group_offload(
            onload_device=CPU, offload_device=CPU, offload_type="leaf_level", offload_to_disk_path=str(tmp_path)
        )
        attach(transformer, groups())
        assert torch.allclose(transformer(**given).sample, wanted, atol=1e-5)


def test_refusals():
    with pytest.raises(TypeError, match="cannot run a AutoencoderKLWan; supported are CogVideoXTr"):
        attach(AutoencoderKLWan(base_dim=4, num_res_blocks=1), groups())
    transformer = wan()
    attachment = attach(transformer, groups())
    with pytest.raises(ValueError, match="attached already: call detach"):
        attach(transformer, groups())
    attachment.detach()
    with pytest.raises(ValueError, match="4 heads on 1 ranks allow head_groups 1 to 4, got 5"):
        attach(transformer, groups(), head_groups=5)
    attach(transformer, groups(), head_groups=4).detach()


def refusals_on_ranks():
    transformer = wan()
    apply_first_block_cache(transformer, FirstBlockCacheConfig())  # is_cache_enabled does not know of it
    attach(transformer, groups(cfg=1))
    with torch.no_grad(), transformer.cache_context("x"), pytest.raises(RuntimeError, match="step cache is enabled"):
        transformer(**inputs(transformer))
    found = []

    def failing(change, **degrees):
        transformer = wan()
        try:
            attachment = attach(transformer, groups(**degrees))
            change(transformer, attachment)
            with torch.no_grad():
                transformer(**inputs(transformer))
        except (RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")

    failing(lambda transformer, _: transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1)), cfg=1)
    failing(lambda transformer, _: transformer.blocks[1].attn1.set_processor(None), cfg=1)
    failing(lambda *_: None, cfg=2)
    transformer = wan()
    attach(transformer, groups(cfg=1))
    try:
        transformer(**inputs(transformer))
    except RuntimeError as error:
        found.append(str(error))
    return found


def test_refusals_on_ranks(pool):
    for cache, processor, guided, training in pool.run(2, refusals_on_ranks):
        assert "a step cache is enabled" in cache and "disable_cache()" in cache
        assert "processor was replaced by NoneType after attach()" in processor
        assert "cfg=2 with Wan needs guided=" in guided
        assert "only runs inference" in training


@pytest.mark.parametrize("trained", ["blocks.1.ffn.net.2.weight", "blocks.0.attn1.to_q.weight", None])
def test_training_on_one_process_is_refused_too(trained):
    """Also where the base is frozen, or only an input wants a gradient."""
    transformer = wan().requires_grad_(False)
    given = inputs(transformer)
    if trained is None:
        given["hidden_states"].requires_grad_()
    else:
        transformer.get_parameter(trained).requires_grad_()
    attach(transformer, groups())
    with pytest.raises(RuntimeError, match="only runs inference"):
        transformer(**given)


@pytest.mark.parametrize("make", [wan, cogvideox])
def test_detach_leaves_nothing(make):
    transformer = make()
    before = {name: set(vars(module)) for name, module in transformer.named_modules()}
    attach(transformer, groups()).detach()
    assert {name: set(vars(module)) for name, module in transformer.named_modules()} == before


def blocks_of(transformer):
    return transformer.blocks if hasattr(transformer, "blocks") else transformer.transformer_blocks


def double(module):
    """As adapters do that put a forward of their own in place of a module's."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: 2 * forward(*args, **kwargs)


REPLACED = {
    wan: ["attn1.to_q", "attn1.to_out.0", "ffn.net.0.proj", "norm1"],
    cogvideox: ["attn1.to_q", "attn1.to_out.0", "ff.net.0.proj", "norm1.norm"],
}


def with_other_forwards(make, name):
    transformer = make()
    for block in blocks_of(transformer):
        double(block.get_submodule(name))
    given = inputs(transformer)
    with torch.no_grad():
        wanted = transformer(**given).sample
        attached = attach(transformer, groups(cfg=1))
        return float((transformer(**given).sample - wanted).norm() / wanted.norm()), attached.notes


@pytest.mark.parametrize(("make", "name"), [(make, name) for make, names in REPLACED.items() for name in names])
def test_other_forwards_count(pool, make, name):
    for error, notes in pool.run(2, with_other_forwards, make, name):
        assert error < 1e-5
        assert name == "attn1.to_out.0" or any("forward" in one or "hooks" in one for one in notes)


def hook_it(attention):
    attention.norm_k.register_forward_hook(lambda module, args, output: 2 * output)


def drop_it(attention):
    attention.norm_k = nn.Identity()


@pytest.mark.parametrize("change", [hook_it, drop_it, lambda attention: double(attention.norm_k)])
@pytest.mark.parametrize("make", [wan, cogvideox])
def test_norms_that_would_be_ignored_are_refused(make, change):
    transformer = make()
    change(blocks_of(transformer)[0].attn1)
    attach(transformer, groups())
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"norm_k is a torch\.nn.*would ignore it"):
        transformer(**inputs(transformer))


def with_fewer_blocks():
    transformer = cogvideox()
    given = inputs(transformer)
    with torch.no_grad():
        attach(transformer, groups(cfg=1))
        transformer(**given)
        transformer.transformer_blocks = transformer.transformer_blocks[:1]
        found = transformer(**given).sample
        plain = cogvideox()
        plain.transformer_blocks = plain.transformer_blocks[:1]
        return float((found - plain(**given).sample).abs().max())


def test_blocks_may_be_others_in_the_next_call(pool):
    """No MLP is put off that no block is left to hide."""
    assert max(pool.run(2, with_fewer_blocks)) < 1e-5
