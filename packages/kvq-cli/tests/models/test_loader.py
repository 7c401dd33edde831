"""Loading: the real models, tiny directories, and what damaged ones say."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from kvq_cli.config import UnsupportedModel, geometry
from kvq_cli.models.loader import ModelLoadError, load, read_config
from kvq_cli.models.source import ModelSource, resolve

TEXT = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def save(model: torch.nn.Module, directory: Path) -> Path:
    model.save_pretrained(directory)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    return directory


@pytest.fixture
def directory(tmp_path) -> Path:
    torch.manual_seed(0)
    return save(LlamaForCausalLM(LlamaConfig(**TEXT)), tmp_path / "tiny")


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_smollm2_answers_and_loads_again_fast(smollm2_dir):
    loaded = load(resolve("demo"))
    assert loaded.name == "SmolLM2-135M-Instruct"
    facts = loaded.geometry
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (30, 9, 3, 64)
    assert facts.eos_token_ids == (2,) and facts.windows == (None,) * 30
    prompt = loaded.tokenizer("The capital of France is", return_tensors="pt")
    answer = loaded.model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert loaded.tokenizer.decode(answer[0]) == "The capital of France is Paris"
    start = time.perf_counter()
    load(resolve(str(smollm2_dir)))
    assert time.perf_counter() - start < 10  # 0.8 s on two idle cores


def test_gemmas_geometry_is_read_before_any_conversion(gemma_gguf, gemma_dir):
    before = geometry(read_config(ModelSource(gemma_gguf, "gguf", "gemma")).to_dict())
    after = geometry(read_config(resolve(str(gemma_dir))).to_dict())
    assert before == after
    assert (before.num_layers, before.num_heads, before.num_kv_heads) == (18, 4, 1)
    assert (before.head_dim, before.window, before.full_layers) == (256, 512, (5, 11, 17))


def test_reading_a_config_touches_no_weights(directory):
    (directory / "model.safetensors").write_bytes(b"")
    assert geometry(read_config(resolve(str(directory))).to_dict()).num_layers == 7


def test_a_directory_loads_in_the_dtype_asked_for_ready_to_run(directory):
    told = []
    loaded = load(
        resolve(str(directory)),
        dtype=torch.bfloat16,
        progress=lambda *step: told.append(step),
    )
    weights = list(loaded.model.parameters())
    assert {w.dtype for w in weights} == {torch.bfloat16}
    assert not loaded.model.training and not any(w.requires_grad for w in weights)
    assert told == [("loading tiny", 0, 1), ("loading tiny", 1, 1)]
    assert loaded.tokenizer.encode("b") == AutoTokenizer.from_pretrained(directory).encode("b")


def test_generation_config_knows_more_ends_of_text(directory):
    edit(directory / "generation_config.json", eos_token_id=[2, 7])
    assert load(resolve(str(directory))).geometry.eos_token_ids == (2, 7)


def test_a_multimodal_model_serves_its_text_part(tmp_path):
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(
        text_config=TEXT | {"sliding_window": 16},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=60,
    )
    loaded = load(resolve(str(save(Gemma3ForConditionalGeneration(config), tmp_path / "mm"))))
    assert loaded.geometry.windows == (16, 16, 16, 16, 16, None, 16)
    tokens = torch.tensor([[1, 2, 3]])
    places = torch.arange(3)[None]
    logits = loaded.model(tokens, position_ids=places, logits_to_keep=torch.tensor([2])).logits
    assert logits.shape == (1, 1, 64)


def test_an_unsupported_model_is_refused_before_its_weights_are_read(directory):
    edit(directory / "config.json", model_type="gpt2")
    (directory / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="'gpt2' is not supported"):
        load(resolve(str(directory)))


def test_code_that_comes_with_a_model_is_not_run(directory):
    edit(directory / "config.json", model_type="own", auto_map={"AutoConfig": "code.Config"})
    (directory / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load(resolve(str(directory)))


def cut_short(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def drop_a_weight(directory: Path) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def drop_the_tokenizer(directory: Path) -> None:
    for file in directory.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (cut_short, "cannot be loaded"),
        (drop_a_weight, "1 weights are missing, model.norm.weight among them"),
        (drop_the_tokenizer, "it has no tokenizer.json"),
        (lambda d: edit(d / "config.json", intermediate_size=32), "cannot be loaded"),
        (lambda d: edit(d / "config.json", model_type="unheard-of"), "unheard-of"),
        (lambda d: edit(d / "config.json", hidden_size="x"), "cannot be loaded"),
        (lambda d: (d / "config.json").write_text("{"), "not a valid JSON file"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "cannot be loaded"),
    ],
)
def test_a_damaged_directory_is_named_with_what_is_wrong(directory, damage, complaint):
    damage(directory)
    with pytest.raises(ModelLoadError, match=complaint) as refused:
        load(resolve(str(directory)))
    assert str(directory) in str(refused.value)
