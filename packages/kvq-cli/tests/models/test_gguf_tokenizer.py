"""Tokenizers built from GGUF vocabularies, against SentencePiece and transformers' own pieces."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvq_cli.models.gguf_file import GgufError, read_gguf
from kvq_cli.models.gguf_tokenizer import build_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden/gemma3_270m_tokens.json").read_text("utf-8"))
TEXTS = st.text(alphabet="ab cZ 09\n\t\r.,'’s漢é😀²<|", max_size=40)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="module")
def gemma(gemma_dir) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(gemma_dir)


def test_gemma_ids_equal_sentencepiece(gemma):
    assert len(GOLDEN) > 90
    for text, ids in GOLDEN:
        assert gemma.encode(text, add_special_tokens=False) == ids, text
        assert gemma.decode(ids) == text


def test_gemma_starts_with_bos_and_hides_it(gemma, gemma_gguf):
    words = read_gguf(gemma_gguf).metadata["tokenizer.ggml.tokens"]
    ids = gemma.encode("The capital")
    assert ids[0] == gemma.bos_token_id == words.index("<bos>")
    assert [words[i] for i in ids[1:]] == ["The", "▁capital"]
    assert gemma.decode(ids, skip_special_tokens=True) == "The capital"


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_every_id_is_the_files_own(model, request):
    tokenizer = request.getfixturevalue(model)
    words = read_gguf(request.getfixturevalue(f"{model}_gguf")).metadata["tokenizer.ggml.tokens"]
    assert len(tokenizer) == len(words)
    assert tokenizer.convert_ids_to_tokens(list(range(len(words)))) == words
    assert tokenizer.convert_tokens_to_ids(words) == list(range(len(words)))


@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_smollm2_text_survives(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


def test_smollm2_known_ids(smollm2):
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]


@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_smollm2_splits_digits_one_by_one_and_the_rest_as_gpt2(smollm2, text):
    rule = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    ours = smollm2.backend_tokenizer.pre_tokenizer
    assert ours.pre_tokenize_str(text) == rule.pre_tokenize_str(text)


def test_smollm2_chat_template_survives(smollm2, smollm2_gguf):
    stored = read_gguf(smollm2_gguf).metadata["tokenizer.chat_template"]
    assert smollm2.chat_template == stored
    text = smollm2.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.encode(text)
    assert ids[0] == 1 and ids.count(2) == 2  # whole markers, not their letters
    assert "<|im_end|>" not in smollm2.decode(ids, skip_special_tokens=True)


MARKER = "<|end|>"


def write_byte_level(path: Path, rule: str, merges: list[str]) -> Path:
    """A vocabulary of all bytes, the results of merges and a marker."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), MARKER]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=["llama-bpe", "qwen2", "gpt-2"])
def words_file(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("words") / "words.gguf"
    return write_byte_level(path, request.param, ["Ġ a", "b c", "1 2", "12 3", "Ġ Ġ", "' s"])


@pytest.fixture(scope="module")
def pair(words_file):
    """Our tokenizer and transformers' own of one file."""
    theirs = AutoTokenizer.from_pretrained(words_file.parent, gguf_file=words_file.name)
    return build_tokenizer(read_gguf(words_file)), theirs


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="the reader compared with ignores the file's splitting rule before transformers 5.24",
)
@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_splitting_rules_equal_transformers(pair, text):
    ours, theirs = pair
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text


def test_a_marker_is_one_token_that_decoding_can_skip(words_file):
    ours = build_tokenizer(read_gguf(words_file))
    ids = ours.encode(f"a{MARKER}bc")
    assert ids[1] == ours.eos_token_id and len(ids) == 3
    assert ours.decode(ids, skip_special_tokens=True) == "abc"


@pytest.mark.parametrize(
    ("rule", "merges", "complaint"),
    [
        ("poetry", ["Ġ a"], "split by rule 'poetry'; known are default, gpt-2, smollm"),
        ("qwen2", ["Ġ a", "ab cd"], "vocabulary is damaged"),
        ("qwen2", [], "lacks merges"),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused(tmp_path, rule, merges, complaint):
    file = read_gguf(write_byte_level(tmp_path / "words.gguf", rule, merges))
    with pytest.raises(GgufError, match=complaint):
        build_tokenizer(file)


def test_more_tokens_than_embedding_rows_are_refused(tmp_path):
    file = read_gguf(write_byte_level(tmp_path / "words.gguf", "qwen2", ["Ġ a"]))
    file.metadata["tokenizer.ggml.tokens"].append("one more")
    with pytest.raises(GgufError, match="vocabulary is damaged: 259 tokens"):
        build_tokenizer(file)
