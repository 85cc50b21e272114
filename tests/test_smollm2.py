"""The GGUF converter against llama.cpp's own permutation, on small files written here."""

import json

import numpy as np
import pytest
import torch

from jetrl_bench import smollm2

gguf = pytest.importorskip("gguf", reason="extra smollm2")

HEADS, KV_HEADS, HIDDEN, FFN, VOCAB = 4, 2, 64, 96, 32


def llama_cpp_permute(weights, n_head):
    """convert_hf_to_gguf.py of llama.cpp (LlamaModel.permute)."""
    return (
        weights.reshape(n_head, 2, weights.shape[0] // n_head // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(path, architecture="llama", extra=None, quantised=()):
    """A one-layer model; returns its Hugging Face tensors."""
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    out = {}
    for name, shape in shapes.items():
        weight = rng.standard_normal(shape).astype(np.float32)
        out[name] = weight
        stored = weight
        if name.endswith("attn_q"):
            stored = llama_cpp_permute(weight, HEADS)
        elif name.endswith("attn_k"):
            stored = llama_cpp_permute(weight, KV_HEADS)
        if name in quantised:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", stored)
    if extra:
        writer.add_tensor(extra, np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_weights_and_config_come_back(tmp_path):
    original = write_gguf(tmp_path / "a.gguf")
    config, tensors = smollm2.read_gguf(tmp_path / "a.gguf")
    assert len(tensors) == len(original)
    for name, theirs in (
        ("token_embd", "model.embed_tokens.weight"),
        ("blk.0.attn_q", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.0.attn_k", "model.layers.0.self_attn.k_proj.weight"),
        ("blk.0.attn_v", "model.layers.0.self_attn.v_proj.weight"),
        ("blk.0.ffn_down", "model.layers.0.mlp.down_proj.weight"),
        ("blk.0.ffn_norm", "model.layers.0.post_attention_layernorm.weight"),
    ):
        assert np.array_equal(tensors[theirs], original[name]), name
    assert config["rope_theta"] == 100000.0 and config["rms_norm_eps"] == 1e-05
    assert config["head_dim"] == HIDDEN // HEADS and config["num_key_value_heads"] == KV_HEADS
    assert config["tie_word_embeddings"] is True and config["vocab_size"] == VOCAB


def test_four_bit_blocks_are_dequantised_by_their_formula(tmp_path):
    """Q4_1: 32 values share d and m (fp16); value = code * d + m. The low nibbles are the first 16 values."""
    write_gguf(tmp_path / "a.gguf", quantised=("blk.0.ffn_up",))
    _, tensors = smollm2.read_gguf(tmp_path / "a.gguf")
    raw = next(t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors if t.name == "blk.0.ffn_up.weight").data
    blocks = np.frombuffer(raw.tobytes(), np.uint8).reshape(-1, 20)
    d, m = blocks[:, :2].copy().view(np.float16), blocks[:, 2:4].copy().view(np.float16)
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
    expected = codes.astype(np.float32) * d.astype(np.float32) + m.astype(np.float32)
    got = tensors["model.layers.0.mlp.up_proj.weight"]
    assert np.allclose(got, expected.reshape(got.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "architecture, extra, message",
    [("gemma", None, "architecture 'gemma' is not 'llama'"), ("llama", "blk.0.rope.weight", "no place in a Llama")],
)
def test_other_models_are_refused(tmp_path, architecture, extra, message):
    write_gguf(tmp_path / "a.gguf", architecture, extra)
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        config, _ = smollm2.read_gguf(tmp_path / "a.gguf")
        assert config is None


def test_missing_files_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        smollm2.read_gguf(tmp_path / "none.gguf")


def test_another_release_of_the_package_is_refused(tmp_path, monkeypatch):
    write_gguf(tmp_path / "a.gguf")
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / "a.gguf")
    with pytest.raises(ValueError, match="is not the published"):
        smollm2.convert(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_intact_folder_is_not_converted_again(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    note = {"safetensors_sha256": smollm2.sha256(tmp_path / "model.safetensors")}
    (tmp_path / "smollm2.json").write_text(json.dumps(note))
    assert smollm2.convert(tmp_path, tmp_path / "absent.gguf") == note
    (tmp_path / "model.safetensors").write_bytes(b"altered")
    with pytest.raises(ValueError, match="no such file"):
        smollm2.convert(tmp_path, tmp_path / "absent.gguf")


def test_rotary_halves_are_undone_for_any_head_count():
    weight = torch.arange(8 * 6 * 5, dtype=torch.float32).reshape(48, 5).numpy()
    for heads in (1, 2, 4, 6, 12):
        assert np.array_equal(smollm2.unpermute(llama_cpp_permute(weight, heads), heads), weight)
