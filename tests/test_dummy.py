"""Full-size models with random weights: the published sizes, in the types that diffusers would load."""

import copy
from functools import partial

import diffusers
import pytest
import torch
from diffusers import CogVideoXPipeline, WanPipeline

from fodit.testing import dummy

# Billions of parameters of one transformer and of the VAE, spatial compression.
SIZES = {
    "CogVideoX-2b": (1.694, 0.2156, 8),
    "CogVideoX-5b": (5.570, 0.2156, 8),
    "CogVideoX1.5-5b": (5.571, 0.2156, 8),
    "Wan2.1-T2V-1.3B": (1.419, 0.1269, 8),
    "Wan2.1-T2V-14B": (14.29, 0.1269, 8),
    "Wan2.2-T2V-A14B": (14.29, 0.1269, 8),
    "Wan2.2-TI2V-5B": (5.000, 0.7047, 16),
}


def pipeline_class(name: str) -> type:
    return WanPipeline if name.startswith("Wan") else CogVideoXPipeline


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads cost more than they bring with products this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small(monkeypatch):
    """Shrink every configuration to a few channels; all else, positions and schedulers included, stays."""
    full = dummy.config

    def shrunk(name):
        spec = copy.deepcopy(full(name))
        spec["text_embedding"][1] = 32
        for role, settings in spec["components"].items():
            if role.startswith("transformer"):
                settings |= {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3}
                wan = {"text_dim": 32, "ffn_dim": 64, "freq_dim": 32, "rope_max_seq_len": 32}
                settings |= wan if "Wan" in name else {"text_embed_dim": 32, "time_embed_dim": 16}
        vae = spec["components"]["vae"]
        if "Wan" in name:
            vae |= {
                "base_dim": 8,
                "decoder_base_dim": 8 if vae["decoder_base_dim"] else None,
                "num_res_blocks": 1,
            }
        else:
            vae |= {"block_out_channels": [4, 4, 4, 4], "norm_num_groups": 2, "layers_per_block": 1}
        return spec

    monkeypatch.setattr(dummy, "config", shrunk)


@pytest.mark.parametrize("name", dummy.MODELS)
def test_sizes_are_the_published_ones(name):
    pipe = dummy.pipeline(name, pipeline_class(name), device="meta")
    transformer, vae, spatial = SIZES[name]
    billions = {
        role: sum(p.numel() for p in component.parameters()) / 1e9
        for role, component in pipe.components.items()
        if isinstance(component, torch.nn.Module)
    }
    assert billions["transformer"] == pytest.approx(transformer, rel=0.02)
    assert billions.get("transformer_2", 0) == pytest.approx(transformer if "A14B" in name else 0, rel=0.02)
    assert billions["vae"] == pytest.approx(vae, rel=0.02)
    assert (pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal) == (spatial, 4)
    assert all(p.is_meta for p in pipe.transformer.parameters())

    settings, call = pipe.transformer.config, dummy.call_arguments(name)
    tokens, channels = dummy.config(name)["text_embedding"]
    wan = "Wan" in name
    assert channels == (settings.text_dim if wan else settings.text_embed_dim)
    assert tokens == (512 if wan else settings.max_text_seq_length)
    assert settings.in_channels == (pipe.vae.config.z_dim if wan else pipe.vae.config.latent_channels)
    patch = spatial * (settings.patch_size[1] if wan else settings.patch_size)
    assert call["height"] % patch == call["width"] % patch == 0
    assert call["num_frames"] % 4 == 1
    if not wan:
        assert (call["height"], call["width"]) == (8 * settings.sample_height, 8 * settings.sample_width)
        assert call["num_frames"] == settings.sample_frames


@pytest.mark.parametrize("name", dummy.MODELS)
def test_small_copy_generates(name, small):
    class Subclass(pipeline_class(name)):
        pass

    pipe = dummy.pipeline(name, Subclass, device="cpu", dtype=torch.float32)
    assert type(pipe) is Subclass
    pipe.set_progress_bar_config(disable=True)
    call = dummy.call_arguments(name) | {"height": 32, "width": 64, "num_frames": 9, "num_inference_steps": 2}
    frames = pipe(**dummy.prompt_embeds(name, dtype=torch.float32), **call, output_type="pt").frames
    assert frames.shape == (1, 9, 3, 32, 64)
    assert frames.isfinite().all() and frames.std() > 0


@pytest.mark.parametrize("name", ["CogVideoX-2b", "Wan2.2-TI2V-5B"])
def test_buffers_and_types_are_those_of_a_loaded_model(name, small, tmp_path):
    built = dummy.pipeline(name, pipeline_class(name), dtype=torch.bfloat16)
    for role in ("transformer", "vae"):
        settings = dummy.config(name)["components"][role]
        cls = getattr(diffusers, settings["_class_name"])
        constructed = cls.from_config(settings)
        constructed.save_pretrained(tmp_path / role)
        loaded = cls.from_pretrained(tmp_path / role, torch_dtype=torch.bfloat16)
        ours = getattr(built, role)
        assert {k: v.dtype for k, v in parameters(ours).items()} == {k: v.dtype for k, v in parameters(loaded).items()}
        assert not ours.training
        buffers = dict(constructed.named_buffers())
        assert buffers.keys() == dict(ours.named_buffers()).keys()
        for key, buffer in ours.named_buffers():
            assert torch.equal(buffer, buffers[key])
            assert buffer.dtype == loaded.get_buffer(key).dtype
        if role == "transformer":
            assert buffers  # positions: sincos table of CogVideoX-2b, RoPE tables of Wan
            kinds = {v.dtype for v in parameters(ours).values()}
            assert kinds == ({torch.bfloat16, torch.float32} if "Wan" in name else {torch.bfloat16})


def test_weights_follow_the_seed_alone(small):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    build = partial(dummy.pipeline, "Wan2.2-T2V-A14B", WanPipeline, dtype=torch.float32)
    first, again, other, short = build(), build(), build(seed=1), build(num_layers=1)
    assert torch.equal(before, torch.random.get_rng_state())

    weights, copies = parameters(first.transformer), parameters(again.transformer)
    assert all(torch.equal(weights[key], copies[key]) for key in weights)
    key = "blocks.0.attn1.to_q.weight"
    assert not torch.equal(weights[key], parameters(other.transformer)[key])
    assert not torch.equal(weights[key], parameters(first.transformer_2)[key])
    assert weights[key].std() == pytest.approx(0.02, rel=0.1)
    assert weights["blocks.0.attn1.norm_q.weight"].mean() == pytest.approx(1, abs=0.05)

    assert len(first.transformer.blocks) == 3
    assert len(short.transformer.blocks) == len(short.transformer_2.blocks) == 1
    weights, copies = parameters(first.vae), parameters(short.vae)
    assert all(torch.equal(weights[key], copies[key]) for key in weights)


def test_prompt_embeds():
    embeds = dummy.prompt_embeds("CogVideoX-5b", dtype=torch.bfloat16, seed=3)
    again = dummy.prompt_embeds("CogVideoX-5b", dtype=torch.bfloat16, seed=3)
    assert embeds.keys() == {"prompt_embeds", "negative_prompt_embeds"}
    for key, value in embeds.items():
        assert value.shape == (1, 226, 4096) and value.dtype == torch.bfloat16
        assert torch.equal(value, again[key])
    assert not torch.equal(embeds["prompt_embeds"], embeds["negative_prompt_embeds"])


@pytest.mark.parametrize(
    "alias, name",
    [
        ("cogvideox-5B", "CogVideoX-5b"),
        ("zai-org/CogVideoX1.5-5B", "CogVideoX1.5-5b"),
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "Wan2.1-T2V-14B"),
        ("wan2.1-1.3b", "Wan2.1-T2V-1.3B"),
        ("WAN2.2-A14B", "Wan2.2-T2V-A14B"),
        ("wan2.2-ti2v-5b", "Wan2.2-TI2V-5B"),
    ],
)
def test_names(alias, name):
    assert dummy.config(alias) == dummy.config(name)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"'wan3'.*CogVideoX-2b.*Wan2\.2-TI2V-5B"):
        dummy.config("wan3")
    with pytest.raises(ValueError, match=r"CogVideoX-2b needs CogVideoXPipeline.*not WanPipeline"):
        dummy.pipeline("CogVideoX-2b", WanPipeline, device="meta")
    for num_layers in (0, 31):
        with pytest.raises(ValueError, match=f"num_layers is {num_layers}; CogVideoX-2b can have 1 to 30"):
            dummy.pipeline("CogVideoX-2b", CogVideoXPipeline, device="meta", num_layers=num_layers)
