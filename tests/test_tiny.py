"""Tiny checkpoints: they load offline, generate varied video, and notice every missing scale and bias."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from diffusers import CogVideoXPipeline, DiffusionPipeline, WanPipeline

from fodit.testing import tiny


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads cost more than they bring with products this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {kind: tiny.make(kind, root / kind) for kind in tiny.KINDS}


@pytest.fixture(scope="module")
def pipes(folders) -> dict[str, DiffusionPipeline]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        pipes = {kind: DiffusionPipeline.from_pretrained(folder) for kind, folder in folders.items()}
    for pipe in pipes.values():
        pipe.set_progress_bar_config(disable=True)
    return pipes


def generate(pipe, prompt="a red cat is running", **arguments):
    arguments = {"height": 64, "width": 80, "num_frames": 9, "output_type": "np"} | arguments
    generator = torch.Generator().manual_seed(0)
    return np.asarray(pipe(prompt, num_inference_steps=3, generator=generator, **arguments).frames)


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_folder_is_a_small_pipeline(kind, folders, pipes):
    pipe = pipes[kind]
    assert type(pipe) is (WanPipeline if kind.startswith("wan") else CogVideoXPipeline)
    assert pipe.vae_scale_factor_spatial == 8 and pipe.vae_scale_factor_temporal == 4
    assert sum(len(content) for content in files(folders[kind]).values()) < 1.25e6
    assert pipe.transformer.config.num_attention_heads >= 4


def test_kinds_differ_where_the_published_models_do(pipes):
    rope, sincos, newer = (pipes[kind].transformer.config for kind in tiny.KINDS[:3])
    assert rope.use_rotary_positional_embeddings and not sincos.use_rotary_positional_embeddings
    assert (rope.patch_size_t, newer.patch_size_t, newer.patch_bias) == (None, 2, False)
    assert type(pipes["cogvideox-1.5"].scheduler).__name__ == "CogVideoXDPMScheduler"
    assert pipes["wan2.1"].transformer_2 is None and pipes["wan2.1"].config.boundary_ratio is None
    assert pipes["wan2.2"].transformer_2 is not None and pipes["wan2.2"].config.boundary_ratio == 0.875


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_video_is_not_degenerate(kind, pipes):
    frames = generate(pipes[kind])
    assert frames.shape == (1, 9, 64, 80, 3) and np.isfinite(frames).all()
    assert frames.std() > 0.05
    assert ((frames == 0) | (frames == 1)).mean() < 0.2
    assert np.abs(np.diff(frames, axis=1)).mean((0, 2, 3, 4)).min() > 0.01
    assert np.abs(frames - generate(pipes[kind], prompt="snow on a mountain")).max() > 1e-3


@pytest.mark.parametrize("kind", tiny.KINDS[:3])
def test_cogvideox_has_small_default_sizes(kind, pipes):
    height, width = (96, 128) if kind == "cogvideox-1.5" else (64, 96)
    frames = generate(pipes[kind], height=None, width=None, num_frames=None)
    assert frames.shape == (1, 9, height, width, 3)


def test_wan22_uses_both_transformers(pipes):
    calls = []
    pipe = pipes["wan2.2"]
    for role in ("transformer", "transformer_2"):
        getattr(pipe, role).register_forward_pre_hook(lambda *_, role=role: calls.append(role))
    generate(pipe, output_type="latent")
    assert set(calls) == {"transformer", "transformer_2"}


@pytest.mark.parametrize("kind", tiny.KINDS)
@torch.no_grad()
def test_every_scale_and_bias_of_the_transformer_matters(kind, pipes):
    transformer = pipes[kind].transformer
    # Without rotation a bias of the keys adds the same to all scores of a query, and softmax ignores that.
    no_effect = "attn1.norm_k.bias" if kind == "cogvideox-sincos" else None
    generator = torch.Generator().manual_seed(0)
    if kind.startswith("wan"):
        shape, text_length = (1, 16, 3, 8, 8), 16
    elif kind == "cogvideox-sincos":
        shape, text_length = (1, 3, 16, 8, 12), 226  # the sizes whose position table the model holds ready
    else:
        shape, text_length = (1, 4, 16, 8, 8), 16
    inputs = {
        "hidden_states": torch.randn(shape, generator=generator),
        "encoder_hidden_states": torch.randn(1, text_length, tiny.TEXT_CHANNELS, generator=generator),
        "timestep": torch.tensor([500]),
    }
    if transformer.config.get("use_rotary_positional_embeddings"):
        inputs["image_rotary_emb"] = pipes[kind]._prepare_rotary_positional_embeddings(64, 64, 4, "cpu")
    expected = transformer(**inputs).sample
    checked = 0
    for name, parameter in transformer.named_parameters():
        if parameter.dim() != 1 and "scale_shift_table" not in name:
            continue
        kept = parameter.clone()
        parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        change = (transformer(**inputs).sample - expected).norm() / expected.norm()
        parameter.copy_(kept)
        checked += 1
        if no_effect is None or no_effect not in name:
            assert change > 1e-4, name
    assert checked > 20


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_same_seed_same_files(kind, folders, tmp_path):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    same, other = tiny.make(kind, tmp_path / "same"), tiny.make(kind, tmp_path / "other", seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert files(same) == files(folders[kind])
    changed = {name for name, content in files(other).items() if content != files(same)[name]}
    assert changed == {name for name in files(same) if name.endswith(".safetensors")}


@pytest.mark.parametrize("kind", ["cogvideox-rope", "wan2.1"])
def test_tokenizer_keeps_any_text(kind, folders, pipes):
    index = json.loads((folders[kind] / "model_index.json").read_text())
    library, name = index["tokenizer"]
    assert library == "transformers" and hasattr(transformers, name)
    tokenizer = pipes[kind].tokenizer
    again = transformers.AutoTokenizer.from_pretrained(folders[kind] / "tokenizer")
    for text in ("a cat walking in the rain", "Zebra #7, 50% faster!", "猫が走る: naïve"):
        ids = tokenizer(text).input_ids
        assert ids == again(text).input_ids and ids[-1] == tokenizer.eos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer("").input_ids == [tokenizer.eos_token_id]
    padded = tokenizer("cat", padding="max_length", return_tensors="pt")
    assert padded.input_ids.shape == (1, 512 if kind == "wan2.1" else 226)
    assert padded.attention_mask.sum() == 2


def test_unknown_kind_names_the_kinds(tmp_path):
    with pytest.raises(ValueError, match=r"'wan3'.*cogvideox-rope.*wan2\.2"):
        tiny.make("wan3", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_nothing_is_overwritten_unasked(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        tiny.make("wan2.1", tmp_path)
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        tiny.make("wan2.1", tmp_path / "notes.txt", overwrite=True)
    with pytest.raises(SystemExit):
        tiny.main(["wan2.1", str(tmp_path)])
    assert "--overwrite" in capsys.readouterr().err
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]

    tiny.main(["wan2.1", str(tmp_path), "--overwrite"])
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "model_index.json").exists()


def test_empty_folder_is_used(tmp_path):
    assert tiny.make("cogvideox-sincos", str(tmp_path)) == tmp_path
    assert (tmp_path / "transformer" / "config.json").exists()
