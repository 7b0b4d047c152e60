"""Small tokenizers of every supported kind, trained on a page of text by the library itself."""

import json
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from umbel.srt.tokenizer.file import read_tokenizer_file, token_table
from umbel.srt.tokenizer.hf import HFTokenizer
from umbel.srt.tokenizer.vocabulary import Vocabulary

CORPUS = [
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "Essays about cities: clarity, originality, evidence. A state of the art in 2026!",
    "def fork(state, n):\n    return [state.copy() for _ in range(n)]\n\n\n",
    "naïve café déjà vu – 東京 と 大阪 – Привет, мир – 🙂🙃 👩‍👩‍👧",
    "{'role': 'user', 'content': '<think>hm</think>'}   spaces    here",
] * 3

CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def byte_level() -> Tokenizer:
    """As Qwen and Llama 3: byte-level BPE, no BOS, one visible added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<tool call>", normalized=False)])
    return tokenizer


def split_byte_level() -> Tokenizer:
    """As Llama 3: an expression cuts the text, BOS is added."""
    tokenizer = byte_level()
    expression = Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(expression, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = _begin_with(tokenizer, "<s>")
    return tokenizer


def prefixed_byte_level() -> Tokenizer:
    """As GPT-2 in some configurations: a space before the text unless it has one."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def prepend_bpe() -> Tokenizer:
    """As Llama 2: a normalizer always puts a space before the text; bytes for what the vocabulary lacks."""
    tokenizer = _byte_fallback_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def metaspace_bpe() -> Tokenizer:
    """As Mistral: the space comes from the pre-tokenizer, unless the text begins with one."""
    tokenizer = _byte_fallback_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def gemma_like() -> Tokenizer:
    """As Gemma: no first space, bytes for what the vocabulary lacks, BOS."""
    tokenizer = _byte_fallback_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def unigram() -> Tokenizer:
    """As XLM-R: pieces with scores, control tokens among the pieces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=260, special_tokens=[*CONTROL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = _begin_with(tokenizer, "<s>")
    return tokenizer


BUILDERS = {
    "byte level": byte_level,
    "byte level, split": split_byte_level,
    "byte level, prefixed": prefixed_byte_level,
    "BPE, Prepend": prepend_bpe,
    "BPE, Metaspace": metaspace_bpe,
    "BPE, Gemma": gemma_like,
    "Unigram": unigram,
}
LOSSLESS = [name for name in BUILDERS if name != "Unigram"]  # Unigram here has no bytes to fall back on


def wrap(tokenizer: Tokenizer, **config: Any) -> HFTokenizer:  # Any: fields of tokenizer_config.json
    """The library's tokenizer as the runtime sees it."""
    path = Path("tokenizer.json")
    file = read_tokenizer_file(tokenizer.to_str().encode(), path)
    return HFTokenizer(
        file,
        vocabulary=Vocabulary.of(token_table(file, path)),
        config={"bos_token": "<s>", "eos_token": "</s>", **config},
        chat_template=None,
        eos_ids=[tokenizer.token_to_id("</s>")],
        name="toy",
        path=path,
    )


def _byte_fallback_bpe() -> Tokenizer:
    """BPE over characters whose first ids are control tokens and the 256 bytes, as SentencePiece numbers them."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁(?=[^▁])"), behavior="merged_with_next")
    trained.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=260, show_progress=False))
    spec = json.loads(trained.to_str())
    pieces = ["<unk>", *CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *spec["model"]["vocab"]]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in spec["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<unk>", *CONTROL)])
    tokenizer.post_processor = _begin_with(tokenizer, "<s>")
    return tokenizer


def _begin_with(tokenizer: Tokenizer, bos: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def reread(tokenizer: Tokenizer, **changes: Any) -> Tokenizer:  # Any: parts of tokenizer.json
    """The tokenizer with parts of its JSON replaced."""
    return Tokenizer.from_str(msgspec.json.encode({**json.loads(tokenizer.to_str()), **changes}).decode())
