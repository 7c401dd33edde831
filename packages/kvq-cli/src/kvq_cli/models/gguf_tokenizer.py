"""The tokenizer of a GGUF file, from its own vocabulary.

Not left to transformers: its reader splits by GPT-2's rule whenever it does not know the file's,
and orders Gemma's merges differently from one version to the next.
"""

from __future__ import annotations

from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers import pre_tokenizers as splitters
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kvq_cli.models.gguf_config import EMBEDDING
from kvq_cli.models.gguf_file import GgufError, GgufFile

_SPACE = "\u2581"  # how SentencePiece spells a space
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(file: GgufFile) -> Any:
    """The tokenizer that the file's metadata describes, chat template included.

    Raises
    ------
    GgufError : a kind of vocabulary or a splitting rule that is not known
    """
    kind = _get(file, "model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise GgufError(
            f"{file.path.name}: tokenizer {kind!r} is not converted; "
            f"known are {', '.join(builders)}"
        )
    tokens = _get(file, "tokens") or []
    _check_lengths(file, tokens)
    backend = builders[kind](file, tokens)
    kinds = _get(file, "token_type") or [TokenType.NORMAL] * len(tokens)
    whole = {TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(token, special=whole[TokenType(k)], normalized=False)
            for token, k in zip(tokens, kinds, strict=True)
            if k in whole
        ]
    )
    roles = {role: _get(file, f"{name}_token_id") for role, name in _ROLES.items()}
    named = {role: tokens[index] for role, index in roles.items() if index is not None}
    if _adds_bos(file) and "bos_token" in named:
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, roles["bos_token"])],
        )
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=file.field("context_length"),
        **named,
    )
    tokenizer.chat_template = file.metadata.get("tokenizer.chat_template")
    return tokenizer


def _get(file: GgufFile, key: str) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{key}")


def _check_lengths(file: GgufFile, tokens: list[str]) -> None:
    rows = file.tensors[EMBEDDING].shape[0]
    sizes = {key: len(_get(file, key) or tokens) for key in ("token_type", "scores")}
    largest_id = max(_get(file, f"{name}_token_id") or 0 for name in _ROLES.values())
    if not largest_id < len(tokens) <= rows or any(n != len(tokens) for n in sizes.values()):
        raise GgufError(
            f"{file.path.name}: its vocabulary is damaged: {len(tokens)} tokens, {sizes}, "
            f"special tokens up to {largest_id}, {rows} embedding rows"
        )


def _adds_bos(file: GgufFile) -> bool:
    stated = _get(file, "add_bos_token")
    # llama.cpp's rule for files that do not say
    by_kind = _get(file, "model") == "llama" or _get(file, "pre") == "llama-bpe"
    return by_kind if stated is None else bool(stated)


def _bpe(file: GgufFile, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> BPE:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the library raises no narrower type
        raise GgufError(f"{file.path.name}: its vocabulary is damaged: {error}") from error


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE: the merges are in the file, the rule that splits words is only named."""
    rule = _get(file, "pre") or "default"
    if rule not in _SPLITS:
        raise GgufError(
            f"{file.path.name}: its words are split by rule {rule!r}; "
            f"known are {', '.join(_SPLITS)}"
        )
    pairs = (merge.partition(" ") for merge in _get(file, "merges") or ())
    merges = [(left, right) for left, _, right in pairs]
    if not merges:
        raise GgufError(f"{file.path.name}: its vocabulary lacks merges")
    backend = Tokenizer(_bpe(file, tokens, merges, ignore_merges=rule == "llama-bpe"))
    split = [splitters.Split(Regex(_SPLITS[rule]), "isolated")] if _SPLITS[rule] else []
    by_gpt2 = rule in _THEN_GPT2
    backend.pre_tokenizer = splitters.Sequence(
        [*split, splitters.ByteLevel(add_prefix_space=False, use_regex=by_gpt2)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _word_split(digits: str) -> str:
    return "|".join(
        (
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )


_SPLITS = {
    "default": "",
    "gpt-2": "",
    "smollm": r"\p{N}",
    "llama-bpe": _word_split(r"\p{N}{1,3}"),
    "qwen2": _word_split(r"\p{N}"),
}
_THEN_GPT2 = ("default", "gpt-2", "smollm")


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE: two neighbours merge when their union is a word, the best score first."""
    scores, kinds = _get(file, "scores"), _get(file, "token_type")
    if not scores or not kinds:
        raise GgufError(f"{file.path.name}: its vocabulary lacks scores or token types")
    ranked = sorted(
        (index for index, kind in enumerate(kinds) if kind == TokenType.NORMAL),
        key=lambda index: (-scores[index], index),
    )
    words = {tokens[index] for index in ranked}
    merges = [
        (word[:cut], word[cut:])
        for word in (tokens[index] for index in ranked)
        for cut in range(1, len(word))
        if word[:cut] in words and word[cut:] in words
    ]
    unknown = _get(file, "unknown_token_id")
    unknown_word = None if unknown is None else tokens[unknown]
    backend = Tokenizer(
        _bpe(file, tokens, merges, unk_token=unknown_word, fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    restore = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _get(file, "add_space_prefix") in (None, True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        backend.decoder = decoders.Sequence([*restore, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(restore)
    return backend
