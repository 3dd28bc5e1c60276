"""Fused blocks against diffusers' own, with diffusers' own attention processors around them."""

import copy

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import nn

from fodit.models.blocks import FusedCogVideoXBlock, FusedWanBlock
from fodit.models.ulysses import joined

HEADS, DIM = 3, 8
WIDTH = HEADS * DIM


def randomise(block):
    for parameter in block.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return block.eval().requires_grad_(False)


def wan_block(cross_attn_norm=True):
    return randomise(WanTransformerBlock(WIDTH, 40, HEADS, cross_attn_norm=cross_attn_norm))


def wan_inputs(batch=2, tokens=11, per_token=False, dtype=torch.float32):
    angles = torch.randn(1, tokens, 1, DIM // 2).repeat_interleave(2, dim=-1)
    temb = torch.randn(batch, *([tokens] if per_token else []), 6, WIDTH, dtype=dtype)
    text = torch.randn(batch, 5, WIDTH, dtype=dtype)
    return torch.randn(batch, tokens, WIDTH, dtype=dtype), text, temb, (angles.cos(), angles.sin())


def cogvideox_block(bias=True):
    return randomise(CogVideoXBlock(WIDTH, HEADS, DIM, 12, dropout=0.1, attention_bias=bias))


def cogvideox_inputs(batch=2, video=9, text=4, rotary=True, dtype=torch.float32):
    angles = torch.randn(video, DIM // 2).repeat_interleave(2, dim=-1)
    tables = (angles.cos(), angles.sin()) if rotary else None
    temb = torch.randn(batch, 12, dtype=dtype)
    return torch.randn(batch, video, WIDTH, dtype=dtype), torch.randn(batch, text, WIDTH, dtype=dtype), temb, tables


def fused(block, hook):
    """A copy of the block with the hook, which is returned too."""
    block = copy.deepcopy(block)
    HookRegistry.check_if_exists_or_initialize(block).register_hook(hook, "fused")
    return block, hook


def close(got, wanted, limit=1e-5):
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert (got.double() - wanted.double()).norm() <= limit * wanted.double().norm()


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("cross_attn_norm", [False, True])
@pytest.mark.parametrize("batch, tokens", [(1, 1), (2, 11)])
def test_wan(batch, tokens, cross_attn_norm, per_token):
    plain = wan_block(cross_attn_norm)
    given = wan_inputs(batch, tokens, per_token)
    block, hook = fused(plain, FusedWanBlock())
    before = [one.clone() for one in given[:3]]
    close(block(*given), plain(*given))
    assert hook.reasons == set()
    assert all(torch.equal(a, b) for a, b in zip(before, given[:3], strict=True)), "inputs stay as they are"


@pytest.mark.parametrize("text", [0, 1, 4])
@pytest.mark.parametrize("batch, video", [(1, 1), (2, 9)])
def test_cogvideox(batch, video, text):
    plain = cogvideox_block()
    given = cogvideox_inputs(batch, video, text)
    block, hook = fused(plain, FusedCogVideoXBlock())
    for got, wanted in zip(block(*given), plain(*given), strict=True):
        close(got, wanted)
    assert hook.reasons == set()


def test_cogvideox_without_rotation_and_with_a_chain_of_blocks():
    first, second = cogvideox_block(), cogvideox_block(bias=False)
    video, text, temb, _ = cogvideox_inputs(rotary=False)
    wanted = second(*first(video, text, temb), temb)
    first, second = fused(first, FusedCogVideoXBlock())[0], fused(second, FusedCogVideoXBlock())[0]
    between = first(video, text, temb)
    assert joined(between[1], between[0]).data_ptr() == between[1].data_ptr(), "text and video are one tensor"
    for got, want in zip(second(*between, temb), wanted, strict=True):
        close(got, want)


@pytest.mark.parametrize("make, inputs, hook", [
    (wan_block, wan_inputs, FusedWanBlock), (cogvideox_block, cogvideox_inputs, FusedCogVideoXBlock)
])  # fmt: skip
def test_bf16_error_is_no_larger_than_diffusers(make, inputs, hook):
    torch.manual_seed(0)
    exact = make()
    plain = copy.deepcopy(exact).bfloat16()
    block, _ = fused(plain, hook())
    mine = theirs = 0.0
    for _ in range(8):
        given = inputs(dtype=torch.bfloat16)
        precise = tuple(one.float() if isinstance(one, torch.Tensor) else one for one in given)
        exact.load_state_dict({name: value.float() for name, value in plain.state_dict().items()})
        wanted = first(exact(*precise))
        mine += float((first(block(*given)).float() - wanted).square().sum())
        theirs += float((first(plain(*given)).float() - wanted).square().sum())
    assert mine <= 1.1**2 * theirs


def first(output):
    return output[0] if isinstance(output, tuple) else output


class Scaled(nn.Module):
    """Stands for an adapter around a Linear."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 1.5 * self.inner(x)


def test_an_adapter_in_the_mlp_is_called_and_named():
    plain = wan_block()
    plain.ffn.net[0].proj = Scaled(plain.ffn.net[0].proj)
    plain.ffn.net[2] = Scaled(plain.ffn.net[2])
    given = wan_inputs()
    block, hook = fused(plain, FusedWanBlock())
    close(block(*given), plain(*given))
    assert hook.reasons == {"GELU not fused: its projection is a test_blocks.Scaled"}


def replace_norm(block):
    block.norm3 = nn.LayerNorm(WIDTH)


def watch_norm(block):
    block.norm1.register_forward_hook(lambda module, args, output: output * 2)


def wrap_forward(block):
    class Twice(ModelHook):
        def post_forward(self, module, output):
            return 2 * output

    HookRegistry.check_if_exists_or_initialize(block).register_hook(Twice(), "twice")


@pytest.mark.parametrize("change, words", [
    (replace_norm, "norm3 is a LayerNorm"), (watch_norm, "norm1 has hooks"), (wrap_forward, "hooks from before"),
])  # fmt: skip
def test_an_unexpected_block_runs_its_own_forward_and_says_why(change, words):
    plain = wan_block()
    block = copy.deepcopy(plain)
    change(plain)
    change(block)
    hook = FusedWanBlock()
    HookRegistry.check_if_exists_or_initialize(block).register_hook(hook, "fused")
    given = wan_inputs()
    close(block(*given), plain(*given))
    assert len(hook.reasons) == 1 and words in hook.reasons.pop()


def test_joined_is_a_view_only_of_neighbours():
    whole = torch.randn(2, 7, 3)
    text, video = whole[:, :3], whole[:, 3:]
    assert joined(text, video).data_ptr() == whole.data_ptr()
    assert torch.equal(joined(text, video), whole)
    for one, other in ((text.clone(), video), (whole[:, :2], video), (text, video.clone())):
        assert torch.equal(joined(one, other), torch.cat([one, other], dim=1))
    assert joined(whole[:, :0], whole) is whole and joined(whole, whole[:, :0]) is whole
    swapped = torch.randn(7, 2, 3).transpose(0, 1)
    assert torch.equal(joined(swapped[:, :3], swapped[:, 3:]), swapped)
