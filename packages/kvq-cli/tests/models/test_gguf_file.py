"""Headers of GGUF files against the gguf package; damaged files."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_gguf

from kvq_cli.config import ConfigError, geometry
from kvq_cli.models.gguf_config import hf_config
from kvq_cli.models.gguf_file import GgufError, read_gguf

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.fixture
def mixed_file(tmp_path) -> Path:
    """Metadata of every type and a tensor of every kind that the gguf package can write."""
    path = tmp_path / "mixed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for width in (8, 16, 32, 64):
        getattr(writer, f"add_uint{width}")(f"my.uint{width}", 100 + width)
        getattr(writer, f"add_int{width}")(f"my.int{width}", -width)
    writer.add_float32("my.float32", 0.1)
    writer.add_float64("my.float64", 0.1)
    writer.add_bool("my.bool", True)
    writer.add_string("my.text", "Grüße 漢字")
    writer.add_array("my.texts", ["a", "", "é"])
    writer.add_array("my.numbers", [1, 2, 3])
    writer.add_array("my.reals", [0.5, 0.25])
    rows = np.random.default_rng(3).standard_normal((6, 64)).astype(np.float32)
    for kind in KINDS:
        quantized = gguf.GGMLQuantizationType[kind]
        data = rows if kind == "F32" else gguf.quantize(rows, quantized)
        writer.add_tensor(kind, data, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_values_equal_the_gguf_packages(mixed_file):
    ours, theirs = read_gguf(mixed_file), gguf.GGUFReader(mixed_file)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert len(fields) == 16
    assert list(ours.tensors) == [t.name for t in theirs.tensors] == KINDS
    for tensor in theirs.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours.values(tensor.name), expected), tensor.name


def test_real_files_headers_are_read_whole(smollm2_gguf, gemma_gguf):
    smollm2, gemma = read_gguf(smollm2_gguf), read_gguf(gemma_gguf)
    assert (smollm2.architecture, len(smollm2.tensors)) == ("llama", 272)
    assert (gemma.architecture, len(gemma.tensors)) == ("gemma3", 236)
    assert smollm2.field("attention.head_count_kv") == 3
    assert gemma.field("attention.sliding_window") == 512
    assert len(gemma.metadata["tokenizer.ggml.tokens"]) == 262144


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not a GGUF file: it has 0 bytes"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file: it starts with b'PK"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(60), "GGUF version 1; versions 2 and 3"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(60), "does not name its architecture"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 60, "cut short: its header"),
    ],
)
def test_other_files_are_refused(tmp_path, content, complaint):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=complaint):
        read_gguf(path)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = tiny_gguf.write(tmp_path / "whole.gguf", "qwen2").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 23, 24, 100, 3000, len(whole) // 2, len(whole) - 100):
        cut.write_bytes(whole[:size])
        with pytest.raises(GgufError, match=r"cut short|not a GGUF file"):
            read_gguf(cut)


def test_a_header_with_random_bytes_is_read_or_refused_but_never_crashes(tmp_path):
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama")
    whole = path.read_bytes()
    header = min(tensor.start for tensor in read_gguf(path).tensors.values())
    rng = random.Random(5)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 2, 8])):
            damaged[rng.randrange(header)] = rng.choice([0, 255, rng.randrange(256)])
        path.write_bytes(damaged)
        try:
            geometry(hf_config(read_gguf(path)).to_dict())
        except ConfigError:
            refused += 1
    assert 100 < refused < 400


def test_a_block_format_without_decoder_is_named(tmp_path):
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("odd", np.zeros((1, 4), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(GgufError, match="tensor odd is I32"):
        read_gguf(path).values("odd")
