"""The shapes model as a checkpoint: its sizes, its tokenizer, and the files of a LLaVA folder."""

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from .dialogues import BOS, CHAT_TEMPLATE, CONTROL, END, IMAGE, PAD

FOLDER = Path(__file__).resolve().parent / "model"
SIDE, PATCH = 96, 32  # pixels: a patch is a cell of a scene, so nine tokens are a picture
PATCHES = (SIDE // PATCH) ** 2
VOCABULARY = 1024
CONTEXT = 2048
MEAN, DEVIATION = 0.5, 0.5  # of every channel


def make_config() -> LlavaConfig:
    """About two million parameters. Heads of 32 dimensions, which the native kernels take."""
    tower = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=128,
    )
    decoder = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=CONTROL.index(BOS),
        eos_token_id=CONTROL.index(END),
        pad_token_id=CONTROL.index(PAD),
    )
    return LlavaConfig(
        vision_config=tower,
        text_config=decoder,
        image_token_index=CONTROL.index(IMAGE),
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )


class ShapesTokenizer:
    """Byte-level BPE, whose merges are learnt from the dialogues: most of their words are one token."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.tokenizer = Tokenizer(BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(CONTROL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        self.tokenizer.train_from_iterator(texts, trainer)
        self.tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, CONTROL.index(BOS))]
        )
        self.encode = lru_cache(maxsize=100_000)(self._encode)

    def control(self, token: str) -> int:
        return CONTROL.index(token)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def save(model: LlavaForConditionalGeneration, tokenizer: ShapesTokenizer, folder: Path) -> None:
    """Weights in bfloat16, which the kernels compute with, and everything that transformers wants beside them."""
    model.to(torch.bfloat16).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        model_max_length=CONTEXT,
    )
    fast.chat_template = CHAT_TEMPLATE
    pictures = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_mean=[MEAN] * 3,
        image_std=[DEVIATION] * 3,
    )
    processor = LlavaProcessor(
        image_processor=pictures,
        tokenizer=fast,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(folder)
    pictures.save_pretrained(folder)


def parameters(folder: Path = FOLDER) -> int:
    """How many the weights' file holds, read from its header."""
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    sizes = (torch.Size(entry["shape"]).numel() for name, entry in header.items() if name != "__metadata__")
    return sum(sizes)
